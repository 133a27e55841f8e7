"""Machine code of a program, with the evidence that every probe records: registers, spills, stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kernels.runtime import Lowered, Program, lower
from probes import toolchain
from tests.gate_engine import Evidence


@dataclasses.dataclass(frozen=True)
class MachineCode:
    lowered: Lowered
    resources: toolchain.Resources
    instructions: toolchain.Instructions


@pytest.fixture
def machine_code(evidence: Evidence) -> Callable[..., MachineCode]:
    """machine_code(program, case=""): compiled for sm_90a as TileLang compiles it; fails on any spill or stack use.

    `case` tells programs of one criterion apart in the record.
    """

    def compiled(program: Program, case: str = "") -> MachineCode:
        lowered = lower(program)
        fast = program.pass_configs.get("tl.enable_fast_math", False)
        path = toolchain.cubin(lowered.source, flags=("--use_fast_math",) if fast else ())
        found = MachineCode(lowered, toolchain.resources(path), toolchain.sass(path))
        suffix = f", {case}" if case else ""
        evidence.note(f"registers per thread{suffix}", found.resources.registers)
        evidence.equal(f"spilled bytes{suffix}", found.resources.spills, 0, "B")
        evidence.equal(f"stack{suffix}", found.resources.stack, 0, "B")
        return found

    return compiled
