"""How time and bytes are counted."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.bench import timing
from tests.bench.ceilings import Ceiling, ceiling_of
from tests.bench.problem import COLD_FACTOR, DTYPES, OPS, Problem, Shape
from tests.bench.session import DeviceClock
from tests.bench.shapes import QUICK_BATCHES, chosen
from tests.gate_engine import Evidence
from tests.shapes import BATCHES, HEADS, TOKENS

L2 = 2**20


@pytest.mark.criterion("7.3")
def test_turns_are_interleaved_and_begin_with_another_each_time() -> None:
    calls: list[str] = []

    def lane(name: str, us: float) -> float:
        calls.append(name)
        return us

    lanes = {name: (lambda name=name, us=us: lane(name, us)) for name, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    samples = timing.interleave(lanes, 4)
    assert samples == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"


@pytest.mark.criterion("7.3")
def test_median_and_spread() -> None:
    samples = [5.0, 1.0, 9.0, 4.0, 6.0, 100.0, 5.5]
    assert timing.median(samples) == 5.5
    assert timing.spread(samples) == pytest.approx((9.0 - 4.0) / 5.5)
    assert timing.spread([1.0, 9.0]) == 0.0


@pytest.mark.criterion("7.3")
def test_bytes_of_an_op(evidence: Evidence) -> None:
    """Written out by hand for N = 3, T = 4, H = 2, HV = 4, K = V = 128."""
    state = 4 * 128 * 128 * 2
    token = 2 * (2 * 128 + 2 * 128 + 4 * 128 + 4 * 128 + 4 + 4)  # q, k, v, o, a, b in bf16
    expected = {
        ("verify-snapshots", 4, "bf16"): 3 * 5 * state + 12 * token,
        ("verify-snapshots", 4, "fp32"): 3 * 5 * 2 * state + 12 * token,
        ("verify-replay", 4, "bf16"): 3 * state + 12 * token,
        ("decode", 1, "bf16"): 3 * 2 * state + 3 * token,
        ("decode-dense", 4, "fp32"): 3 * 2 * 2 * state + 12 * (token + 2 * (4 + 4)),  # gates of 4 bytes, not 2
        ("commit", 4, "bf16"): 3 * 2 * state,
        ("ring", 4, "bf16"): (3 + 1) * state + 12 * token,
        ("prepass", 4, "bf16"): 12 * token,
    }
    for (op, T, pool), count in expected.items():
        evidence.equal(f"{op}, {pool}", Shape(op, 3, T, 2, 4, pool).bytes_moved, count, "bytes")


@pytest.mark.criterion("7.3")
@pytest.mark.parametrize("op", ("verify-snapshots", "verify-replay", "decode", "decode-dense", "commit", "ring"))
@pytest.mark.parametrize("N", (1, 5))
def test_cold_shapes_leave_the_cache(op: str, N: int, evidence: Evidence) -> None:
    """Between two visits of a slot, states of COLD_FACTOR times L2 are moved, and no two ways share a slot."""
    shape = Shape(op, N, 1 if op == "decode" else 4, 1, 2)
    problem = Problem(shape, torch.device("cpu"), L2)
    moved = problem.ways * shape.states_moved * shape.state_bytes
    evidence.at_least(f"{op}: states moved per rotation, in caches", moved / L2, COLD_FACTOR, "x L2")
    slots = torch.cat(problem.indices)
    assert slots.unique().numel() == slots.numel() == N * problem.ways
    assert slots.min() == 1 and slots.max() == len(problem.pool) - 1
    assert all(index.data_ptr() % 16 == 0 for index in problem.indices)

    warm = Problem(Shape(op, N, shape.T, 1, 2, cold=False), torch.device("cpu"), L2)
    assert warm.ways == 1


@pytest.mark.criterion("7.3")
def test_dense_states_are_those_of_the_pool() -> None:
    """One contiguous copy a way, K-major; and gates that are those of the raw ones."""
    problem = Problem(Shape("decode-dense", 3, 2, 1, 2, "fp32"), torch.device("cpu"), L2)
    initial, (g, beta) = problem.initial_k_major, problem.activated
    assert problem.ways > 1 and initial.is_contiguous() and initial.dtype == torch.float32
    for way, indices in enumerate(problem.indices):
        assert torch.equal(initial[way], problem.pool[indices.long()].transpose(2, 3))
    assert problem.final_k_major.shape == initial.shape and problem.final_k_major.data_ptr() != initial.data_ptr()
    x = problem.a.double() + problem.dt_bias.double()
    torch.testing.assert_close(g.view(6, 2).double(), -problem.A_log.double().exp() * torch.nn.functional.softplus(x))
    assert torch.equal(beta.view(6, 2), problem.b.double().sigmoid().float())
    problem.reset()
    assert problem.final_k_major[0].isnan().all() and not problem.final_k_major[1:].isnan().any()


@pytest.mark.criterion("7.3")
def test_a_problem_is_its_seed() -> None:
    """A process of its own builds the same inputs; another seed builds others."""
    shape = Shape("ring", 3, 4, 1, 2)
    one, two, other = (Problem(shape, torch.device("cpu"), L2, seed) for seed in (0, 0, 1))
    names = ("mixed", "a", "b", "A_log", "dt_bias", "pool", "lengths", "history", "past_mixed")
    assert all(torch.equal(getattr(one, name), getattr(two, name)) for name in names)
    assert not torch.equal(one.mixed, other.mixed)
    for name in ("A_log", "dt_bias"):
        exact = getattr(one, name)
        assert torch.equal(exact, exact.bfloat16().float()), f"a peer would round {name}"
    assert int((one.history == 14).sum()) == shape.folding == 1


@pytest.mark.criterion("7.3")
def test_the_ceiling_that_applies() -> None:
    names = ("read", "write", "copy", "in-place", "snapshots-4", "snapshots-12", "launch")
    ceilings = {name: Ceiling(float(i), "GB/s", name) for i, name in enumerate(names)}
    applied = {
        ("verify-snapshots", 2): "snapshots-4",
        ("verify-snapshots", 12): "snapshots-12",
        ("verify-snapshots", 16): "snapshots-12",
        ("verify-replay", 12): "read",
        ("ring", 4): "read",
        ("decode", 1): "in-place",
        ("decode-dense", 8): "copy",
        ("commit", 12): "copy",
    }
    for (op, T), name in applied.items():
        ceiling = ceiling_of(Shape(op, 1, T), ceilings)
        assert ceiling is not None and ceiling.how == name
    assert ceiling_of(Shape("decode", 1, 1), {}) is None


@pytest.mark.criterion("7.3")
def test_shapes_of_a_run() -> None:
    quick, full = chosen(False), chosen(True)
    assert set(quick) < set(full) and len(set(full)) == len(full)
    grid = {
        (s.N, s.T, s.H, s.HV, s.pool) for s in full if s.op == "verify-snapshots" and s.cold
    }  # the whole grid of tests/shapes.py
    assert grid == {
        (N, T, *heads, pool) for N in BATCHES for T in TOKENS for heads in HEADS for pool in ("bf16", "fp32")
    }
    assert {s.op for s in chosen(False, ["decode"])} == {"decode"}
    assert {(s.N, s.T, s.pool) for s in chosen(True, ["decode-dense"])} == {
        (N, T, "fp32") for N in QUICK_BATCHES for T in (1, 8)
    }
    assert {(s.H, s.HV) for s in chosen(True, heads="4/8")} == {(4, 8)}
    with pytest.raises(ValueError, match="no shape of op prefill"):
        chosen(False, ["prefill"])
    with pytest.raises(ValueError, match="no shape with heads 3/4; known: 16/32, "):
        chosen(False, heads="3/4")


@pytest.mark.criterion("7.3")
@pytest.mark.parametrize("fields", ({"op": "prefill"}, {"pool": "fp8"}, {"N": 0}, {"T": 0}, {"H": 3, "HV": 4}), ids=str)
def test_a_shape_that_makes_no_sense(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"op must be one of|must be positive"):
        Shape(**({"op": "decode", "N": 1, "T": 1} | fields))  # type: ignore[arg-type]
    assert set(DTYPES) == {"bf16", "fp16", "fp32"} and "decode" in OPS


def test_device_clock_gives_the_samples_back() -> None:
    clock = DeviceClock()
    play = clock.play([3.0, 5.0])
    times = [clock()]
    for _ in range(2):
        play()
        times.append(clock())
    assert [round((b - a) * 1e6, 6) for a, b in itertools.pairwise(times)] == [3.0, 5.0]
