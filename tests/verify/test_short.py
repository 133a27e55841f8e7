"""Gate 3: the program for requests of one and two tokens, in both of its tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.runtime import Program
from kernels.verify import contract
from kernels.verify.config import ShortConfig
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.launch import mutate, refuses, watch
from tests.machine_code import without_spills
from tests.verify.cases import check, check_memory, make
from tests.verify.one_token import differences, different, one_token_calls

POOLS = (torch.bfloat16, torch.float16, torch.float32)
MODULE = "kernels.verify.short"


def is_small(program: Program, N: int) -> bool:
    """Whether N requests run the tile for few requests."""
    c = program.config
    return bool(N * c.HV * (c.V * c.lanes // (32 * c.few_rows)) <= c.few_up_to)


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("steps", (1, 2))
@pytest.mark.parametrize("lossless", (False, True), ids=("", "lossless"))
def test_values_in_both_tiles(
    lossless: bool, steps: int, pool: torch.dtype, device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launched = watch(monkeypatch)
    tiles = []
    for N in (3, 70):
        lengths = [n % (steps + 1) for n in range(1, N + 1)]
        case = make(
            T=lengths, pool=pool, steps=steps, tail=1, pitched=True, device=device, lossless=lossless
        )  # fmt: skip
        case.run()
        check(case, evidence)
        tiles.append(is_small(launched[-1][0], N))
    assert {program.module for program, _ in launched} == {MODULE}
    evidence.equal("programs for both", len({program.label for program, _ in launched}), 1)
    one_tile = pool == torch.float32 and steps == 2  # 8 rows a warp for any number
    evidence.equal("the tile for few requests", tiles, [True, one_tile and is_small(launched[-1][0], 70)])


#: what changes the program, the addresses or the arithmetic
VARIANTS: tuple[dict[str, Any], ...] = (
    {"T": (2, 0, 1), "disable_state_update": False, "tail": 3},
    {"T": (2, 1), "H": 1, "HV": 3, "V": 64, "pitched": True, "pool": torch.float16},
    {"T": (1, 2), "H": 2, "HV": 8, "V": 256, "gate": torch.float32, "bias": torch.bfloat16, "allow_neg_eigval": True},
    {"T": (2, 1), "H": 1, "HV": 2, "fuse_gating": False, "allow_neg_eigval": True, "scale": -0.3},
    {"T": (1, 1), "H": 1, "HV": 1, "use_qk_l2norm_in_kernel": False, "scale": 0.01, "pool": torch.float32},
    {"T": (2, 2), "H": 1, "HV": 2, "scale": 0.0},
)


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_variants(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    """Default mode against fp64; lossless against calls of one token as well, bit for bit."""
    for lossless in (False, True):
        case = make(steps=max(options["T"]), lossless=lossless, device=device, **options)
        if "use_qk_l2norm_in_kernel" in options:
            case.k.div_(16)  # near unit length, else the recurrence explodes
        case.run()
        check(case, evidence)
    for what, count in differences(case, one_token_calls(case)).items():
        evidence.equal(f"{what}: elements that differ from one-token calls", count, 0)


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("commit", (False, True))
def test_padding_is_inert(commit: bool, device: torch.device, evidence: Evidence) -> None:
    """-1 and indices beyond the pool, NaN in their tokens, in the pool's first and last slot and behind a request."""
    case = make(T=(2, 2, 1, 2), slots=9, tail=1, steps=2, disable_state_update=not commit, device=device)
    case.state_indices[:] = torch.tensor([4, -1, 9, 2])
    case.rows[0] = len(case.states.view)
    for x in (case.q, case.k, case.v, case.a, case.b):
        x[2:5] = torch.nan
        x[7:] = torch.nan
    for slot in (0, 8):
        case.pool.view[slot] = torch.nan
    case.pool.before = case.pool.storage.clone()
    want = case.expected()
    case.run()
    check(case, evidence, want)
    assert not case.o.view[2:5].any()


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("steps", (1, 2))
def test_bits_depend_on_nothing_else(steps: int, device: torch.device, evidence: Evidence) -> None:
    """The same request alone and among seventy, with one token and with one of two; a NaN in its second token."""
    many = make(N=70, T=steps, steps=2, device=device)
    many.run()
    alone = make(N=70, T=steps, steps=steps, device=device)
    for name in ("q", "k", "v", "a", "b"):
        setattr(alone, name, getattr(alone, name)[: 3 * steps])
    alone.state_indices, alone.cu_seqlens, alone.rows = alone.state_indices[:3], alone.cu_seqlens[:4], alone.rows[:3]
    alone.o.view = alone.o.view[: 3 * steps]
    for name in ("q", "k", "v", "a", "b"):
        getattr(alone, name)[2 * steps + 1 : 3 * steps] = torch.nan
    alone.run()
    evidence.equal("o: elements that differ", different(alone.o.view[: 2 * steps + 1], many.o.view[: 2 * steps + 1]), 0)
    for n in range(3):
        kept = steps if n < 2 else 1
        row = alone.rows[n]
        found = different(alone.states.view[row, :kept], many.states.view[row, :kept])
        evidence.equal("states: elements that differ", found, 0)


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("commit", (False, True))
@pytest.mark.parametrize(
    "cu_seqlens", ((0, 5, 2), (0, -5, 4), (-7, 2, 4), (0, 2, 2**31 - 1), (2**31 - 1, 0, 4), (4, 4, 4)), ids=str
)
def test_senseless_lengths_are_memory_safe(
    cu_seqlens: tuple[int, ...], commit: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "_check_cu_seqlens", lambda *_: None)
    case = make(T=(2, 2), disable_state_update=not commit, pitched=True, device=device)
    case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    case.run()
    check_memory(case)


@pytest.mark.criterion("3.39")
@pytest.mark.usefixtures("emulator")
def test_a_pool_without_slots_is_all_padding(device: torch.device) -> None:
    case = make(T=(2, 1), device=device)
    case.pool.view = case.pool.view[:0]
    case.run()
    assert not case.o.view.any() and not case.states.changed().any()


TWO = {"blocks_per_sm": 12, "few_up_to": 512}
CONFIGS = (
    *(ShortConfig(H=2, HV=4, pool=pool, tokens=2, **TWO) for pool in ("bfloat16", "float16")),  # type: ignore[arg-type]
    ShortConfig(H=2, HV=4, pool="float32", tokens=2, rows=2, few_rows=1),
    ShortConfig(H=2, HV=4, pool="float32", tokens=1, rows=2, few_rows=1),
    ShortConfig(H=2, HV=4, tokens=1),
    ShortConfig(H=1, HV=2, tokens=2, commit=True, lossless=True, **TWO),  # type: ignore[arg-type]
    ShortConfig(H=1, HV=3, V=64, tokens=2, raw_gates=False, gate_dtype="float32", l2norm=False, **TWO),  # type: ignore[arg-type]
    ShortConfig(H=16, HV=32, tokens=2, **TWO),  # type: ignore[arg-type]
)


@pytest.mark.criterion("3.40")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: Program("short", c).label)
def test_machine_code(config: ShortConfig, evidence: Evidence) -> None:
    registers = 168 if config.tokens == 2 and config.pool != "float32" else 128
    resources, instructions = without_spills(Program(MODULE, config), registers, evidence)
    evidence.equal("barriers", resources.barriers + instructions.of("BAR"), 0)
    evidence.at_least("16-byte loads", instructions.of("LDG", "128"), 8)
    evidence.at_least("16-byte stores", instructions.of("STG", "128"), 8)


@pytest.mark.criterion("3.40")
@pytest.mark.parametrize(
    ("sanitizer", "options"),
    (
        ("thread", {"T": (2, 0, 1), "tail": 2}),
        ("thread", {"T": (2, 1, 2), "pool": torch.float32, "disable_state_update": False, "lossless": True}),
        ("address", {"T": (2, 0, 1), "tail": 2, "pitched": True}),
        ("undefined", {"T": (2, 0, 1), "tail": 2, "pitched": True}),
    ),
    ids=str,
)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    case = make(H=1, HV=2, **options)
    case.state_indices[-1] = -1  # reads no slot that another request writes
    case.run()
    ((program, *args),) = calls
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


#: (what is wrong, pattern in the generated CUDA, replacement)
KERNEL_MUTANTS = (
    ("beta not applied", r"__fmul_rn\(beta(\w*), __fmaf_rn\(", r"__fmul_rn(1.0f, __fmaf_rn("),
    ("output before the update", r"__fmaf_rn\(u(\w*)\[(\w+)\], kq(\w*), ", r"__fmaf_rn(u\1[\2], 0.0f, "),
    ("state not carried", r"if \(1 < stored(\w*)\)", r"if (0 < stored\1)"),
    ("scale not applied", r", scale\);", r", 1.0f);"),
    ("lane stores another row", r"% 8\) == 0\)", r"% 8) == 1)"),
)


@pytest.mark.criterion("3.40")
@pytest.mark.parametrize(("name", "pattern", "replacement"), KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    name: str, pattern: str, replacement: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, pattern, replacement)
    case = make(T=(2, 1, 2), steps=2)
    case.run()
    evidence.equal("mutated kernel refused", refuses(lambda: check(case, Evidence())), True)
