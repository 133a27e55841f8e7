"""Gate 5: what the compiler makes of the programs of commit, and what the sanitizers find in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.replay import contract
from kernels.replay.plan import fold_plan
from kernels.runtime import Program
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.machine_code import without_spills
from tests.replay.commit_cases import Commit, make, run, split
from tests.replay.test_programs import FACTS, planned

VARIANTS = tuple(planned(fold_plan, **facts) for facts in FACTS)


@pytest.mark.costly
@pytest.mark.criterion("5.27")
@pytest.mark.parametrize("program", VARIANTS, ids=lambda program: program.label)
def test_machine_code(program: Program, evidence: Evidence) -> None:
    c = program.config
    _, instructions = without_spills(program, {2: 255, 3: 168}[c.blocks_per_sm], evidence)
    # of both tiles: a lane's part of the rows of its warp
    state = (c.tiles + c.few_tiles) * c.K // 4 * {"float32": 4}.get(c.pool, 2) // 16
    evidence.equal("16-byte loads to registers, less those of states", instructions.of("LDG", "128") - state, 0)
    evidence.at_least("16-byte stores, less those of states", instructions.of("STG", "128") - state, 0)
    evidence.at_least("16-byte asynchronous loads", instructions.of("LDGSTS", "128"), 8)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 64)


@pytest.mark.criterion("5.27")
@pytest.mark.parametrize("N", (1, 64))
def test_the_plan_does_not_depend_on_how_many(N: int, evidence: Evidence) -> None:
    """Few requests and many are told apart by the program at run time: with less work than CTAs the tile is smaller."""
    c = planned(fold_plan, H=16, HV=32).config
    few = N * c.HV * (c.V // (c.warps * 8 * c.few_tiles)) <= c.ctas
    evidence.equal(f"the tile for few requests at N = {N}", few, N == 1)
    assert c.few_tiles < c.tiles


def launched(case: Commit, ctas: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Program, tuple[Any, ...]]:
    """The launch of a case, without running it."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    split(monkeypatch, ctas)
    run(case)
    ((program, *args),) = calls
    return program, tuple(args)


def sanitized(
    case: Commit, ctas: int | None, sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, args = launched(case, ctas, monkeypatch)
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


#: (sanitizer, most CTAs, whether states move, dtype of the pool)
SANITIZED: tuple[tuple[sanitize.Sanitizer, int | None, bool, torch.dtype], ...] = (
    ("thread", None, False, torch.bfloat16),
    ("thread", None, True, torch.bfloat16),
    ("thread", 3, False, torch.bfloat16),
    ("thread", 3, True, torch.float32),
    ("address", None, False, torch.bfloat16),
    ("address", 3, True, torch.bfloat16),
    ("undefined", None, True, torch.bfloat16),
    ("undefined", 3, False, torch.bfloat16),
)


@pytest.mark.costly
@pytest.mark.criterion("5.27")
@pytest.mark.parametrize(("sanitizer", "ctas", "moved", "pool"), SANITIZED, ids=str)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, ctas: int | None, moved: bool, pool: torch.dtype, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With rejected tokens, a request without accepted ones, one without tokens, and one of padding behind the pool's
    last slot, which no request writes."""
    case = make((9, 0, 1, 7, 7), (12, 5, 0, 7, 7), slots=11, pitched=True, tail=1, pool=pool)
    case.state_indices[:] = torch.tensor([3, 1, 0, 4, 2**31 - 1])
    if moved:
        case.targets = torch.tensor([2, 5, 6, 7, 8], dtype=torch.int32)
    sanitized(case, ctas, sanitizer, evidence, monkeypatch)


@pytest.mark.criterion("5.27")
@pytest.mark.parametrize("padding", (-1, 4))
def test_padding_does_not_race(padding: int, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a padded request nothing is read, also not what another request writes: the first slot, or the last."""
    case = make((5, 5), 5, slots=4)
    case.state_indices[:] = torch.tensor([0 if padding < 0 else 3, padding])
    sanitized(case, None, "thread", evidence, monkeypatch)


@pytest.mark.criterion("5.26", "5.27")
@pytest.mark.parametrize("sanitizer", ("address", "undefined"))
@pytest.mark.parametrize(
    "cu_seqlens",
    ((0, 30, 12), (-7, 12, 24), (2**31 - 1, 0, 24), (0, 12, 2**31 - 1), (0, 2**31 - 1, -(2**31))),
    ids=str,
)
@pytest.mark.parametrize("accepted", ((12, 12), (2**31 - 1, -(2**31))), ids=str)
def test_senseless_lengths_under_sanitizers(
    accepted: Sequence[int], cu_seqlens: Sequence[int], sanitizer: sanitize.Sanitizer, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
    case = make(accepted, 12, pitched=True)
    case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    sanitized(case, None, sanitizer, evidence, monkeypatch)
