"""Gate 5: what the compiler makes of the programs, and what the sanitizers find in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.replay import contract
from kernels.replay.plan import plan
from kernels.runtime import Program
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.machine_code import without_spills
from tests.replay.cases import make, run, split


def planned(make: Callable[..., Program] = plan, **facts: Any) -> Program:
    """What a plan of replay says of these facts and the usual ones."""
    usual = {"H": 2, "HV": 4, "K": 128, "V": 128, "pool": "bfloat16", "gate_dtype": "bfloat16"}
    return make(**{**usual, "bias_dtype": "float32", "l2norm": True, **facts})


FACTS: tuple[dict[str, Any], ...] = (
    {},
    {"pool": "float16"},
    {"pool": "float32"},
    {"H": 1, "HV": 2, "V": 64},
    {"H": 1, "HV": 2, "V": 256},
    {"H": 1, "HV": 2, "gate_dtype": "float32", "bias_dtype": "bfloat16"},
    {"l2norm": False},
    {"H": 16, "HV": 32},
)
VARIANTS = tuple(planned(**facts) for facts in FACTS)


@pytest.mark.costly
@pytest.mark.criterion("5.16")
@pytest.mark.parametrize("program", VARIANTS, ids=lambda program: program.label)
def test_machine_code(program: Program, evidence: Evidence) -> None:
    _, instructions = without_spills(program, {2: 255, 3: 168}[program.config.blocks_per_sm], evidence)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 64)
    evidence.at_least("16-byte loads to registers", instructions.of("LDG", "128"), 12)
    evidence.at_least("16-byte asynchronous loads", instructions.of("LDGSTS", "128"), 8)


@pytest.mark.criterion("5.16")
@pytest.mark.parametrize("N", (1, 64))
def test_the_plan_does_not_depend_on_how_many(N: int, evidence: Evidence) -> None:
    """Few requests and many are told apart by the program at run time: with less work than CTAs the tile is smaller."""
    c = planned(H=16, HV=32).config
    few = N * c.HV * (c.V // (c.warps * 8 * c.few_tiles)) <= c.ctas
    evidence.equal(f"the tile for few requests at N = {N}", few, N == 1)
    assert c.few_tiles < c.tiles


#: (sanitizer, most CTAs, options of the case)
SANITIZED: tuple[tuple[sanitize.Sanitizer, int | None, dict[str, Any]], ...] = (
    ("thread", None, {"T": (12, 7)}),
    ("thread", 3, {"T": (12, 0, 7)}),
    ("thread", 3, {"T": (7, 12), "pool": torch.float32}),
    ("address", None, {"T": (12, 0, 7), "pitched": True}),
    ("address", 3, {"T": (12, 0, 7), "pitched": True}),
    ("undefined", None, {"T": (12, 0, 7), "pitched": True}),
    ("undefined", 3, {"T": (12, 0, 7), "pitched": True}),
)


def launched(ctas: int | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Program, tuple[Any, ...]]:
    """The launch of a case, with padding and a senseless length if asked for, without running it."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    split(monkeypatch, ctas)
    cu_seqlens = options.pop("cu_seqlens", None)
    case = make(tail=1, **options)
    case.state_indices[-1] = -1
    if cu_seqlens is not None:
        monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
        case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    run(case)
    ((program, *args),) = calls
    return program, tuple(args)


@pytest.mark.costly
@pytest.mark.criterion("5.17")
@pytest.mark.parametrize(("sanitizer", "ctas", "options"), SANITIZED, ids=str)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, ctas: int | None, options: dict[str, Any], evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    program, args = launched(ctas, monkeypatch, **options)
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


@pytest.mark.criterion("5.12", "5.17")
@pytest.mark.parametrize("sanitizer", ("address", "undefined"))
@pytest.mark.parametrize("cu_seqlens", ((0, 30, 12), (-7, 12, 24), (2**31 - 1, 0, 24), (0, 12, 2**31 - 1)), ids=str)
def test_senseless_lengths_under_sanitizers(
    cu_seqlens: tuple[int, ...], sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, args = launched(None, monkeypatch, T=(12, 12), cu_seqlens=cu_seqlens)
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])
