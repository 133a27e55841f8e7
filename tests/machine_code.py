"""What the gates ask of every program's machine code."""

from __future__ import annotations

from kernels import runtime
from kernels.runtime import Program
from probes import toolchain
from tests.gate_engine import Evidence


def without_spills(
    program: Program, registers: int, evidence: Evidence
) -> tuple[toolchain.Resources, toolchain.Instructions]:
    """Compile for sm_90a: nothing spilled, no stack, at most `registers`, and ordered behind the launch before it.

    Returns what else can be asked.
    """
    cubin = toolchain.cubin(runtime.lower(program).source)
    resources = toolchain.resources(cubin)
    evidence.equal("spilled bytes", resources.spills, 0, "B")
    evidence.equal("stack", resources.stack, 0, "B")
    evidence.at_most("registers", resources.registers, registers, "per thread")
    instructions = toolchain.sass(cubin)
    evidence.equal("accesses ahead of the wait for the launch before", toolchain.before_the_wait(cubin), [])
    evidence.at_least("places where the next launch may start", instructions.of("PREEXIT"), 1)
    return resources, instructions
