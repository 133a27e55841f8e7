"""Gate 4: what the compiler makes of the programs, and what the sanitizers find in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.prepass.config import Config
from kernels.runtime import Program
from kernels.verify import plan as verify_plan
from probes import toolchain
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.machine_code import without_spills
from tests.prepass.cases import make
from tests.verify import cases

CONFIGS = (
    Config(H=2, HV=4),
    Config(H=16, HV=32, bias_dtype="bfloat16"),
    Config(H=1, HV=8, gate_dtype="float32"),
    Config(H=2, HV=2, gate_dtype="float16"),
)


@pytest.mark.criterion("4.10")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: Program("prepass", c).label)
def test_machine_code(config: Config, evidence: Evidence) -> None:
    # 64 registers: eight CTAs of 128 threads on an SM
    resources, instructions = without_spills(Program("kernels.prepass.program", config), 64, evidence)
    evidence.equal("shared memory and barriers", resources.static_shared + resources.barriers, 0)
    evidence.at_least("16-byte loads", instructions.of("LDG", "128"), 2 * config.K // 32)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 4 * config.K // 32)


GIVEN: dict[str, Any] = {
    "K": 128, "V": 128, "raw_gates": False, "gate_dtype": "float32", "bias_dtype": "float32", "l2norm": True,
    "norms_given": True,
}  # fmt: skip
VERIFY = (
    verify_plan.plan(H=16, HV=32, pool="bfloat16", commit=False, max_tokens=16, **GIVEN),
    verify_plan.plan(H=1, HV=2, pool="float32", commit=True, max_tokens=20, **GIVEN),
)


@pytest.mark.criterion("4.10")
@pytest.mark.parametrize("program", VERIFY, ids=lambda program: program.label)
def test_machine_code_of_verify_with_given_norms(program: Program, evidence: Evidence) -> None:
    assert program.config.norms_given
    lowered = runtime.lower(program)
    resources = toolchain.resources(toolchain.cubin(lowered.source))
    evidence.equal("spilled bytes of verify with given norms", resources.spills, 0, "B")
    evidence.equal("stack of verify with given norms", resources.stack, 0, "B")


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The launches that follow, none of which runs."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    return calls


def assert_clean(program: Program, args: list[Any], sanitizer: sanitize.Sanitizer, evidence: Evidence) -> None:
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


@pytest.mark.criterion("4.11")
@pytest.mark.parametrize("sanitizer", ("thread", "address", "undefined"))
def test_sanitizers(sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    make(21, pitched=True).run()
    ((program, *args),) = calls
    assert_clean(program, args, sanitizer, evidence)


@pytest.mark.criterion("4.11")
@pytest.mark.parametrize("sanitizer", ("thread", "address"))
def test_sanitizers_of_verify_with_given_norms(
    sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the values that the prepass, which is only recorded here, would have left in its outputs."""
    calls = recorded(monkeypatch)
    cases.make(T=(20, 0, 7), H=1, HV=2, pool=torch.float32, disable_state_update=False, prepass=True).run()
    (_, (program, *args)) = calls
    g, beta, q_inv_norm, k_inv_norm = args[3:7]
    for x, value in ((g, -0.5), (beta, 0.5), (q_inv_norm, 0.1), (k_inv_norm, 0.1)):
        x.fill_(value)
    assert_clean(program, args, sanitizer, evidence)
