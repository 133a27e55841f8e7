"""Gate 2, dense recurrent decode: machine code, plan, negative controls, sanitizers, graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.decode import dense
from kernels.decode.dense_config import Config
from kernels.decode.dense_plan import plan
from kernels.runtime import Program
from reference import mutants
from reference.recurrence import Recurrence, recurrent
from tests.decode.dense_cases import DenseCase, check, make
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.launch import allocations, mutate, refuses, watch
from tests.machine_code import without_spills

MODULE = "kernels.decode.dense_program"

#: as the value tests call them: layouts, lengths, states that exist, heads in a CTA; and whole models
VARIANTS = (
    Config(H=2, HV=4, l2norm=True),
    Config(H=1, HV=3, V=64, lengths="seqlens"),
    Config(H=1, HV=2, V=256, l2norm=True, lengths="cu_seqlens", v_first=True),
    Config(H=1, HV=4, V=64, l2norm=True, lengths="cu_seqlens", index="int64", has_initial=False),
    Config(H=1, HV=4, V=64, dtype="float16", l2norm=True, head_batch=4),
)


@pytest.mark.criterion("2.30")
@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: Program("dense", c).label)
def test_machine_code(config: Config, evidence: Evidence) -> None:
    registers = 65536 // (32 * config.warps) // config.blocks_per_sm // 8 * 8
    resources, instructions = without_spills(Program(MODULE, config), registers, evidence)
    few = dataclasses.replace(config, BV=config.few_BV)
    vectors = config.rows + few.rows  # a lane's part of the state in both tiles, 16 bytes at a time
    evidence.at_least("16-byte loads", instructions.of("LDG", "128"), vectors if config.has_initial else 2)
    evidence.equal("16-byte stores, less those of a state", instructions.of("STG", "128") - vectors, 0)
    evidence.equal("barriers", resources.barriers + instructions.of("BAR"), 0)
    evidence.equal("shared memory", resources.static_shared, 0, "B")
    # a row of a column is two products, a decay and a rank-one update
    evidence.at_least("fused multiply-adds a state element", instructions.of("FFMA") / (4 * vectors), 2.75)


@pytest.mark.criterion("2.30")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, emulator: None, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = watch(monkeypatch)
    for B, T, pitched in ((1, 1, False), (3, 4, True), (2, 9, False)):
        case = make(B, T, pitched=pitched, device=device)
        case.run()
        check(case, evidence)
    assert len(launched) == 3
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 1)


@pytest.mark.criterion("2.30")
@pytest.mark.parametrize("V", (64, 128, 256))
@pytest.mark.parametrize("head_batch", (None, 1, 2, 4))
def test_plan(V: int, head_batch: int | None, evidence: Evidence) -> None:
    """Two tiles for every shape, of 8 KiB of state a warp and of 4 KiB while requests are few; four warps a CTA."""
    program = plan(
        H=4, HV=16, K=128, V=V, dtype="bfloat16", l2norm=True, has_initial=True, stores_final=True, lengths="all",
        index="int32", v_first=False, head_batch=head_batch,
    )  # fmt: skip
    config = program.config
    evidence.equal("program", program.module, MODULE)
    found = (config.BV, config.few_BV, config.warps, config.blocks_per_sm, config.head_batch)
    evidence.equal("tiles", found, (16, 8, 4, 4, head_batch or 1))
    for tile in (config, dataclasses.replace(config, BV=config.few_BV)):
        columns = tile.tiles * tile.BV * tile.warps
        evidence.equal("columns of all CTAs of the heads they share", columns, V * config.head_batch)


@pytest.mark.criterion("2.20")
@pytest.mark.parametrize("B, few", ((5, True), (40, False)))
@pytest.mark.parametrize("v_first", (False, True))
def test_both_tiles_are_right(
    B: int, few: bool, v_first: bool, device: torch.device, emulator: None, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launched = watch(monkeypatch)
    case = make(B, 3, H=1, HV=4, seqlens=[t % 4 for t in range(B)], state_v_first=v_first, device=device)
    case.run()
    check(case, evidence)
    ((program, _),) = launched
    c = program.config
    evidence.equal("the small tile", B * c.HV * (c.V // c.few_BV) <= c.few_up_to, few)


def faint(case: DenseCase) -> DenseCase:
    case.q.mul_(2.0**-13)
    case.k.mul_(2.0**-13)
    return case


#: the kinds of inputs of the value tests
CASES: dict[str, Callable[[], DenseCase]] = {
    "batch": lambda: make(2, 6),
    "lengths": lambda: make(3, 5, seqlens=(1, 9, 0)),
    "packed, V first": lambda: make(packed=(4, 0, 3), V=64, tail=2, state_v_first=True),
    "no norm": lambda: make(2, 5, H=1, HV=3, use_qk_l2norm_in_kernel=False),
    "scale 0": lambda: make(1, 3, scale=0.0),
    "faint keys": lambda: faint(make(1, 4)),
}  # fmt: skip


def is_seen(recurrence: Recurrence, make_case: Callable[[], DenseCase]) -> bool:
    """Whether `check` refuses what `recurrence` computes."""
    case = make_case()
    try:
        case.fill(recurrence)
        check(case, Evidence())
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.criterion("2.31")
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_passes(name: str) -> None:
    assert not is_seen(recurrent, CASES[name])


@pytest.mark.criterion("2.31")
@pytest.mark.parametrize("name", mutants.names("step", "sequence"))
def test_mutant_of_the_reference_is_seen(name: str, evidence: Evidence) -> None:
    seen_by = [case for case, make_case in CASES.items() if is_seen(mutants.recurrent(name), make_case)]
    evidence.at_least("cases that see a mutant of the reference", len(seen_by), 1)


#: (what is wrong, pattern in the generated CUDA, replacement)
KERNEL_MUTANTS = (
    ("state does not decay", r"\(decay_\d+ \* (S\w*)\[", r"(1.0f * \1["),
    ("output before the update", r"\(own(\w*)\[0\] \* (sums\w*)\[0\]\)", r"(0.0f * \2[0])"),
    ("head map h % H", r"& \(int64_t\)15\) >> \(int64_t\)3\)", "& (int64_t)15) >> (int64_t)2 & (int64_t)1)"),
    ("next token's gates", r"(rate\w*) = (gates\w*)\[1\];", r"\1 = \2[0] + 1.0f;"),
)


@pytest.mark.criterion("2.31")
@pytest.mark.parametrize(("name", "pattern", "replacement"), KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    name: str, pattern: str, replacement: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, pattern, replacement)
    case = make(1, 4)
    case.run()
    evidence.equal("mutated kernel refused", refuses(lambda: check(case, Evidence())), True)


@pytest.mark.criterion("2.31")
@pytest.mark.parametrize(
    ("sanitizer", "options"),
    (
        ("thread", {"H": 1, "HV": 2, "V": 256, "state_v_first": True, "packed": (2,), "tail": 3}),
        ("address", {"H": 1, "HV": 2, "V": 256, "state_v_first": True, "packed": (3, 0, 2), "tail": 3}),
        ("address", {"B": 1, "T": 3, "pitched": True}),
        ("undefined", {"B": 1, "T": 3, "pitched": True}),
    ),
    ids=str,
)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    make(**options).run()
    ((program, *args),) = calls
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


@pytest.mark.criterion("2.31")
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize(
    "starts", ((0, 9, 4), (0, -5, 9), (-7, 5, 9), (0, 5, 2**31 - 1), (2**31 - 1, 0, 9), (12, 9, 9)), ids=str
)
def test_senseless_starts_are_memory_safe(
    starts: tuple[int, ...], index: torch.dtype, device: torch.device, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host would refuse, as a device would see it: the values of these outputs mean nothing."""
    monkeypatch.setattr(dense, "_check_starts", lambda *_: None)
    configuration: dict[str, Any] = (
        {"H": 1, "HV": 4, "V": 64, "initial": False}
        if index == torch.int64
        else {"H": 1, "HV": 2, "V": 256, "state_v_first": True}
    )
    case = make(**configuration, packed=(5, 4), index=index, pitched=True, device=device)
    if index == torch.int64:
        starts = tuple(x * 2**31 if x in (-5, 2**31 - 1) else x for x in starts)
    case.cu_seqlens = torch.tensor(starts, dtype=index, device=device)
    case.run()
    assert case.final is not None
    assert case.o.gaps_intact() and case.final.gaps_intact(), "bytes outside a view changed"
    assert case.initial is None or not case.initial.differs().any()


@pytest.mark.criterion("2.26")
@pytest.mark.sm90
def test_graph_replay_sees_changes(evidence: Evidence) -> None:
    case = make(4, 6, seqlens=(6, 6, 6, 6), device="cuda")
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for seed, lengths in enumerate(((6, 6, 6, 6), (1, 0, 6, 3), (0, 0, 0, 0))):
        other = make(4, 6, seqlens=lengths, seed=seed + 10, device="cuda")
        for name in ("q", "k", "v", "g", "beta", "seqlens"):
            getattr(case, name).copy_(getattr(other, name))
        for mine, new in ((case.o, other.o), (case.initial, other.initial), (case.final, other.final)):
            assert mine is not None and new is not None
            mine.storage.copy_(new.storage)
            mine.before.copy_(new.before)
        graph.replay()
        torch.cuda.synchronize()
        check(case, evidence)


@pytest.mark.criterion("2.26")
@pytest.mark.sm90
def test_low_level_neither_allocates_nor_synchronises(evidence: Evidence) -> None:
    case = make(4, 1, device="cuda")
    case.run()
    evidence.equal("allocations in a call", allocations(case.run), 0)
    check(case, evidence)
