"""Nothing is timed before its output was compared with fp64, and whatever is not timed has a row that says why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.gating import gates
from reference.recurrence import recurrent
from tests.bench import check, timing
from tests.bench.ceilings import Ceiling
from tests.bench.fakes import Fake
from tests.bench.implementation import Bound
from tests.bench.measure import measure
from tests.bench.problem import RING, Problem, Shape
from tests.bench.record import Row
from tests.gate_engine import Evidence

CPU = torch.device("cpu")
CEILINGS = {name: Ceiling(1000.0, "GB/s", "") for name in ("read", "copy", "in-place", "snapshots-3")}
SHAPE = Shape("verify-snapshots", N=2, T=3, H=1, HV=2)


class FakeReplay:
    """Stands in for the CUDA graph: every launch takes 10 us."""

    replayed = 0

    def __init__(self, launch: Callable[[int], Any], ways: int) -> None:
        self.launch = launch

    def round(self) -> float:
        FakeReplay.replayed += 1
        return 10.0


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "Replay", FakeReplay)
    FakeReplay.replayed = 0


def measured(*implementations: Fake, shape: Shape = SHAPE) -> dict[str, Row]:
    rows, _ = measure(shape, list(implementations), CEILINGS, CPU, l2_bytes=1)
    return {row.impl: row for row in rows}


def scale(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs[name] = (outputs[name].double() * factor).bfloat16()

    return spoil


def swap_heads(outputs: dict[str, Tensor]) -> None:
    outputs["o"] = outputs["o"].flip(2)


def transpose_states(outputs: dict[str, Tensor]) -> None:
    outputs["states"] = outputs["states"].mT.contiguous()


def one_nan(outputs: dict[str, Tensor]) -> None:
    outputs["states"][1, 2, 1, 5, 7] = torch.nan


def late_token(outputs: dict[str, Tensor]) -> None:
    outputs["o"][:, -1] = outputs["o"][:, -2]


@pytest.mark.criterion("7.1")
def test_right_output_is_timed() -> None:
    row = measured(Fake("peer-1/right"))["peer-1/right"]
    assert row.checked and row.us == 10.0 and row.spread == 0.0
    assert row.gbps == pytest.approx(SHAPE.bytes_moved / 10e3)
    assert row.share == pytest.approx(SHAPE.bytes_moved / 10e6)
    assert set(row.errors) == {"o", "states", "final"}


@pytest.mark.criterion("7.1")
@pytest.mark.parametrize(
    "spoil",
    (scale("o", 1.02), scale("states", 0.98), scale("final", 1.02), swap_heads, transpose_states, one_nan, late_token),
)
def test_wrong_output_is_not_timed(spoil: Callable[[dict[str, Tensor]], None], evidence: Evidence) -> None:
    rows = measured(Fake("peer-1/wrong", spoil=spoil), Fake("peer-2/right"))
    wrong = rows["peer-1/wrong"]
    assert not wrong.checked and wrong.us is None and wrong.share is None
    assert wrong.note.startswith("wrong: relative L2 error of ")
    assert all(math.isfinite(error) for error in wrong.errors.values())
    assert rows["peer-2/right"].us == 10.0
    evidence.equal("planted errors that were timed", int(wrong.us is not None), 0)


@dataclasses.dataclass
class MovesOn(Fake):
    """Commits to the pool whenever it is launched, as decode does."""

    def bind(self, problem: Problem) -> Bound:
        bound = super().bind(problem)

        def launch(way: int) -> None:
            bound.launch(way)
            problem.pool.mul_(0.5)

        return Bound(launch, bound.outputs, problem.reset)


@dataclasses.dataclass
class KeepsACopy(Fake):
    """Takes its states from the pool when it is bound, as a peer without a pool does."""

    def bind(self, problem: Problem) -> Bound:
        states = problem.states_of_way_0()
        bound = super().bind(problem)

        def launch(way: int) -> None:
            assert torch.equal(states, problem.initial)
            bound.launch(way)

        return Bound(launch, bound.outputs, bound.reset)


@pytest.mark.criterion("7.1")
def test_everyone_starts_from_the_same_states() -> None:
    rows = measured(MovesOn("peer-1/in-place"), KeepsACopy("peer-2/dense"), MovesOn("peer-3/in-place"))
    assert all(row.us == 10.0 for row in rows.values()), rows


@pytest.mark.criterion("7.1")
def test_no_output_is_wrong() -> None:
    row = measured(Fake("peer-1/silent", spoil=lambda outputs: outputs.clear()))["peer-1/silent"]
    assert row.note == "wrong: no output was compared" and row.us is None


@pytest.mark.criterion("7.1")
def test_ours_are_held_to_rounding() -> None:
    """An error that a peer is allowed (bf16 arithmetic inside) is wrong in a kernel of ours."""
    rows = measured(Fake("peer-1/rough", spoil=scale("o", 1.003)), Fake("kernels/rough", spoil=scale("o", 1.003)))
    assert rows["peer-1/rough"].checked and not rows["kernels/rough"].checked


@pytest.mark.criterion("7.2")
def test_what_is_not_timed_says_why() -> None:
    rows = measured(
        Fake("peer-1/missing", missing="not here: install peer"),
        Fake("peer-2/narrow", refuses="T is 3, supported: 4, 8"),
        Fake("peer-3/broken", breaks="out of luck"),
        Fake("peer-4/other", ops=frozenset({"decode"})),
        Fake("peer-5/right"),
    )
    notes = {name: row.note for name, row in rows.items()}
    assert notes["peer-1/missing"] == "not here: install peer"
    assert notes["peer-2/narrow"] == "not supported: T is 3, supported: 4, 8"
    assert notes["peer-3/broken"] == "failed: RuntimeError: out of luck"
    assert "peer-4/other" not in rows
    assert [name for name, row in rows.items() if row.us is not None] == ["peer-5/right"]
    assert not any(row.checked for name, row in rows.items() if name != "peer-5/right")


@dataclasses.dataclass
class DyingPeer(Fake):
    """Runs in another process, which answers `rounds` times and then no more."""

    rounds: int = 3

    def remote(self) -> DyingPeer:
        return self

    def prepare(self, shape: Shape, seed: int, l2_bytes: int) -> tuple[dict[str, float], str]:
        return {"o": 1e-3}, ""

    def round(self) -> float:
        self.rounds -= 1
        if self.rounds < 0:
            raise RuntimeError("its process died with status -9")
        return 10.0

    def release(self) -> None:
        return None


@pytest.mark.criterion("7.2")
def test_a_peer_that_dies_while_it_is_timed() -> None:
    rows = measured(DyingPeer("peer-1/dies"), DyingPeer("peer-2/lives", rounds=99), Fake("peer-3/right"))
    assert rows["peer-1/dies"].us is None and not rows["peer-1/dies"].checked
    assert rows["peer-1/dies"].note == "failed: RuntimeError: its process died with status -9"
    assert rows["peer-2/lives"].us == rows["peer-3/right"].us == 10.0


@pytest.mark.criterion("7.2")
def test_ours_may_not_break() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        measured(Fake("kernels/broken", breaks="out of luck"))


@pytest.mark.criterion("7.1")
@pytest.mark.parametrize("op", ("verify-snapshots", "verify-replay", "commit", "ring", "decode", "decode-dense"))
def test_reference_itself_has_the_error_of_rounding(op: str, evidence: Evidence) -> None:
    """`check.errors` against an independent walk through the tokens of every op: what remains is bf16 rounding."""
    shape = Shape(op, N=5, T=1 if op == "decode" else 4, H=1, HV=2)
    problem = Problem(shape, CPU, l2_bytes=1)
    want = walk(problem)
    found = check.errors(problem, {name: tensor.bfloat16() for name, tensor in want.items()})
    assert set(found) == set(want)
    for name, error in found.items():
        evidence.at_most(f"{name}, relative L2 of bf16 rounding", error, 2e-3)
    for name, error in check.errors(problem, want).items():
        evidence.at_most(f"{name}, relative L2 between two fp64 walks", error, 1e-12)


def walk(problem: Problem) -> dict[str, Tensor]:
    """Request by request in fp64, with reference.recurrence.recurrent."""
    shape, ring = problem.shape, problem.shape.op == "ring"
    outputs: dict[str, list[Tensor]] = {"o": [], "states": [], "final": []}

    def run(mixed: Tensor, a: Tensor, b: Tensor, start: int, count: int, S: Tensor) -> tuple[Tensor, Tensor]:
        here = slice(start, start + count)
        q, k, v = (x[here].double() for x in problem.split(mixed))
        g, beta = gates(problem.A_log.double(), a[here].double(), problem.dt_bias.double(), b[here].double())
        return recurrent(q, k, v, g, beta, S, use_qk_l2norm=True)

    for n in range(shape.N):
        S = problem.initial[n].double()
        if ring:
            past = (problem.past_mixed, problem.past_a, problem.past_b)
            S = run(*past, n * RING, int(problem.history[n]), S)[1][-1]
        o, states = run(problem.mixed, problem.a, problem.b, n * shape.T, shape.T, S)
        outputs["o"].append(o)
        outputs["states"].append(states)
        length = int(problem.lengths[n]) if shape.op == "commit" else shape.T
        outputs["final"].append(S if ring else states[length - 1])
    return {name: torch.stack(tensors) for name, tensors in outputs.items()}
