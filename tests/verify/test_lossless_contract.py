"""Gate 3, lossless: the contract of verify holds as for the default mode; machine code, sanitizers, reference, GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime, verify
from kernels.runtime import Program
from kernels.verify.config import RecurrentConfig
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate, watch
from tests.machine_code import without_spills
from tests.verify import test_errors, test_gates_and_scales, test_values
from tests.verify.cases import Case, check, make, relative_l2
from tests.verify.one_token import different, one_token_calls

COMMITS = (True, False)
POOLS = (torch.bfloat16, torch.float16, torch.float32)

#: (a test of the default mode, its arguments)
REUSED: tuple[tuple[Callable[..., None], dict[str, Any]], ...] = (
    *((test_values.test_pool_dtypes, {"pool": pool, "T": 16}) for pool in POOLS),
    (test_values.test_beyond_one_block, {"pool": torch.bfloat16, "lengths": (40, 0, 3, 16)}),
    *((test_values.test_commit, {"pool": pool, "lengths": (33, 0, 16)}) for pool in POOLS),
    *((test_values.test_ragged, {"lengths": lengths}) for lengths in ((1, 2, 3, 16), (0, 0), (16, 0, 1))),
    (test_values.test_no_requests_and_no_tokens, {}),
    *((test_values.test_padding_is_inert, {"commit": commit}) for commit in COMMITS),
    *((test_values.test_indices_beyond_a_buffer_are_padding, {"commit": commit}) for commit in COMMITS),
    *(
        (test_values.test_senseless_lengths_are_memory_safe, {"commit": commit, "cu_seqlens": lengths})
        for commit in COMMITS
        for lengths in ((0, 30, 12), (-7, 12, 24), (0, 12, 2**31 - 1), (2**31 - 1, 0, 24))
    ),
    (test_values.test_pitches, {"pool": torch.bfloat16}),
    (test_values.test_open_strides_of_single_elements, {}),
    *((test_values.test_head_groups, {"H": H, "HV": HV}) for H, HV in ((2, 2), (1, 3), (2, 8))),
    *((test_values.test_value_dim_is_not_key_dim, {"V": V}) for V in (64, 256)),
    (test_values.test_snapshot_rows_and_steps, {}),
    (test_values.test_requests_sharing_a_slot, {}),
    (test_values.test_nan_stays_where_it_is, {"lengths": (20, 12)}),
    (test_values.test_determinism, {"pool": torch.bfloat16}),
    *((test_values.test_sizes_and_pitches_do_not_compile, {"short": short}) for short in (True, False)),
    *(
        (test_gates_and_scales.test_extreme_gates, {"extreme": extreme, "fuse_gating": fuse_gating})
        for extreme in test_gates_and_scales.EXTREMES
        for fuse_gating in (True, False)
    ),
    (test_gates_and_scales.test_zero_keys_and_queries, {}),
)


@pytest.mark.costly
@pytest.mark.criterion("3.32")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("test", "arguments"), REUSED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_as_in_the_default_mode(
    test: Callable[..., None], arguments: dict[str, Any], device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The test of the default mode on lossless cases: same inputs, same comparisons, same limits."""
    launched = watch(monkeypatch)
    for module in (test_values, test_gates_and_scales):
        monkeypatch.setattr(module, "make", functools.partial(make, lossless=True))
    fixtures: dict[str, Any] = {"device": device, "evidence": evidence, "monkeypatch": monkeypatch}
    wanted = inspect.signature(test).parameters
    test(**arguments, **{name: fixture for name, fixture in fixtures.items() if name in wanted})
    assert {program.module for program, _ in launched} <= {"kernels.verify.recurrent", "kernels.verify.short"}, (
        "the case did not run the lossless program"
    )


@pytest.mark.criterion("3.32")
@pytest.mark.parametrize(
    ("name", "edit", "error", "words"), test_errors.BAD + test_errors.BAD_LAUNCH, ids=lambda x: str(x)[:20]
)
def test_bad_input(
    name: str, edit: Callable[[Case], None], error: type[Exception], words: tuple[str, ...], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(runtime, "cpu_launcher", refuse)
    monkeypatch.setattr(runtime, "executable", lambda program: refuse)
    test_errors.expect_error(make(N=2, T=12, lossless=True, device=device), edit, error, words)


CONFIGS = (
    *(RecurrentConfig(H=2, HV=4, pool=pool) for pool in ("bfloat16", "float16", "float32")),
    RecurrentConfig(H=2, HV=4, commit=True),
    RecurrentConfig(H=1, HV=2, raw_gates=False, gate_dtype="float32"),
    RecurrentConfig(H=1, HV=2, l2norm=False),
    RecurrentConfig(H=1, HV=3, V=64),
    RecurrentConfig(H=16, HV=32),
)


@pytest.mark.criterion("3.33")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: Program("recurrent", c).label)
def test_machine_code(config: RecurrentConfig, evidence: Evidence) -> None:
    # 96 registers: five CTAs of 128 threads on an SM
    _, instructions = without_spills(Program("kernels.verify.recurrent", config), 96, evidence)
    vectors = config.K * config.rows // config.lanes * {"float32": 4}.get(config.pool, 2) // 16  # of a lane's state
    evidence.at_least("16-byte loads from global memory", instructions.of("LDG", "128"), vectors)
    evidence.at_least("16-byte stores to global memory", instructions.of("STG", "128"), vectors * (1 + config.commit))
    evidence.note("instructions", sum(instructions.values()))


#: (sanitizer, options of the case)
SANITIZED: tuple[tuple[sanitize.Sanitizer, dict[str, Any]], ...] = (
    ("thread", {"T": (12, 0, 7)}),
    ("thread", {"T": (20, 16), "pool": torch.float32, "disable_state_update": False}),
    ("address", {"T": (20, 16), "pool": torch.float16, "disable_state_update": False, "pitched": True}),
    ("undefined", {"T": (12, 0, 7), "pitched": True}),
)


@pytest.mark.criterion("3.33")
@pytest.mark.parametrize(("sanitizer", "options"), SANITIZED, ids=str)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    make(H=1, HV=2, tail=1, steps=21 if 20 in options["T"] else 16, lossless=True, **options).run()
    ((program, *args),) = calls
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


@pytest.mark.criterion("3.34")
@pytest.mark.sm90
@pytest.mark.parametrize("commit", COMMITS)
def test_graph_replay_sees_changes(commit: bool, evidence: Evidence) -> None:
    """A replay equals an eager call on the same contents, bit for bit, and allocates nothing."""
    options: dict[str, Any] = {
        "steps": 40, "slots": 9, "disable_state_update": not commit, "lossless": True, "device": "cuda"
    }  # fmt: skip
    case = make(T=(16, 16, 16), **options)
    low_level(case)
    evidence.equal("allocations in a call", allocations(lambda: low_level(case)), 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        low_level(case)
    for seed, lengths in enumerate(((16, 16, 16), (12, 33, 3), (0, 1, 9))):
        other = make(T=lengths, tail=48 - sum(lengths), seed=seed, **options)
        for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_indices", "cu_seqlens", "rows"):
            getattr(case, name).copy_(getattr(other, name))
        for name in ("pool", "o", "states"):
            getattr(case, name).storage.copy_(getattr(other, name).before)
        graph.replay()
        torch.cuda.synchronize()
        other.run()
        for name in ("pool", "o", "states"):
            count = different(getattr(case, name).storage, getattr(other, name).storage)
            evidence.equal(f"{name}: elements by which a replay differs from a call", count, 0)


def low_level(case: Case) -> None:
    verify.fused_recurrent_gdr_verify_gated_fwd(
        case.q, case.k, case.v, case.a, case.b, case.A_log, case.dt_bias, case.pool.view, case.state_indices,
        case.cu_seqlens, case.o.view, case.states.view, case.rows, **case.options,
    )  # fmt: skip


@pytest.mark.criterion("3.34")
@pytest.mark.sm90
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_emulator_and_gpu_agree_bit_for_bit(
    pool: torch.dtype, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exp(0) = 1 and no norm: what is left are IEEE operations in a fixed order, the same on any machine."""
    cases = [
        make(T=(16, 33), pool=pool, use_qk_l2norm_in_kernel=False, scale=0.1, lossless=True, device=device)
        for device in ("cuda", "cpu")
    ]
    for case in cases:
        case.k.mul_(1 / 16)  # near unit length, else the recurrence explodes
        g = torch.zeros(case.a.shape, device=case.a.device)
        beta = torch.linspace(0, 1, g.numel()).view(g.shape).to(g.device)
        with monkeypatch.context() as context:
            if not case.q.is_cuda:
                context.setattr(runtime, "cpu_launcher", emulate)
            verify.fused_recurrent_gdr_verify_fwd(
                case.q, case.k, case.v, g, beta, case.pool.view, case.state_indices, case.cu_seqlens, case.o.view,
                case.states.view, case.rows, **case.options,
            )  # fmt: skip
    for name in ("o", "states"):
        gpu, cpu = (getattr(case, name).storage.cpu() for case in cases)
        evidence.equal(f"{name}: elements that differ between emulator and GPU", different(gpu, cpu), 0)


@pytest.mark.criterion("3.35")
@pytest.mark.parametrize("pool", (*POOLS, torch.float64), ids=str)
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24)))
def test_reference_path(K: int, V: int, pool: torch.dtype, evidence: Evidence) -> None:
    case = make(T=(12, 0, 20), K=K, V=V, pool=pool, lossless=True, disable_state_update=False)
    case.run()
    if pool != torch.float64:
        check(case, evidence)
        return
    want = case.expected()  # an fp64 pool: nothing is rounded
    stored = ~want.states.isnan()
    error = relative_l2(case.states.view[stored], want.states[stored])
    evidence.at_most("states of an fp64 pool, relative L2", error, 1e-14)


@pytest.mark.criterion("3.35")
def test_reference_path_rounds_after_every_token(evidence: Evidence) -> None:
    """It is the default reference fed token by token, but for a rounding here and there, not the one fed at once."""
    case, default = make(T=(12,), lossless=True), make(T=(12,))
    case.run()
    default.run()
    want = one_token_calls(default).states[0].double()
    got, at_once = (x.states.view[x.rows[0], :12] for x in (case, default))
    evidence.at_most(
        "states of the lossless reference against one-token calls, relative L2", relative_l2(got, want), 1e-4
    )
    evidence.at_least("states of the default reference, likewise", relative_l2(at_once, want), 5e-4)
