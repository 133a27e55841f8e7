"""The gates' functions against fp64, over every bf16 value and a sample of fp32 values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program
from probes import fast_math, math_primitives
from tests.gate_engine import Evidence
from tests.probes.conftest import MachineCode

Compile = Callable[..., MachineCode]
Launch = Callable[..., None]

#: CUDA's documented maximum error in ulp, plus half an ulp for the rounded result that it is measured against.
#: sigmoid and softplus add up their steps, in relative error, of which an ulp can be half a unit.
LIMITS = {
    "log": 1.5,
    "log1p": 1.5,
    "exp": 2.5,
    "exp2": 2.5,
    "rsqrt": 2.5,
    "sqrt": 0.501,
    "sigmoid": 7.0,
    "softplus": 8.0,
}
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log": torch.log,
    "log1p": torch.log1p,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.where(x > math_primitives.SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x))),
}
SMALLEST_NORMAL = 2.0**-126


def inputs() -> torch.Tensor:
    """All 65536 bf16 bit patterns, then fp32 numbers of both signs whose magnitudes span 2^-30 to 2^8."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.rand(32768, generator=generator, dtype=torch.float64) * 38 - 30)
    sign = torch.randint(0, 2, (32768,), generator=generator) * 2 - 1
    return torch.cat([every, (sign * size).float()])


def ulp_error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in units of fp32's spacing at `want` (fp64); 0 where both are the same infinity or both NaN.

    Where `want` is below the smallest normal number, any result from 0 to that number is right: hardware may flush.
    """
    want32 = want.float()
    spacing = torch.exp2(torch.floor(torch.log2(want.abs().clamp(min=SMALLEST_NORMAL))) - 23)
    error = (got.double() - want).abs() / spacing
    tiny = want.abs() < SMALLEST_NORMAL
    error = torch.where(tiny & (got.double().abs() <= SMALLEST_NORMAL), torch.zeros_like(error), error)
    special = ~torch.isfinite(want32) | ~torch.isfinite(got)
    same = (got == want32) | (got.isnan() & want32.isnan())
    return torch.where(special, torch.where(same, 0.0, torch.inf), error)


def evaluate(program: Program, x: torch.Tensor, launch: Launch, device: torch.device) -> dict[str, torch.Tensor]:
    out = torch.full((len(math_primitives.FUNCTIONS), len(x)), torch.nan, device=device)
    launch(program, x.to(device), out)
    return dict(zip(math_primitives.FUNCTIONS, out.cpu(), strict=True))


@pytest.mark.criterion("0.5")
def test_accuracy(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    program = Program("probes.math_primitives", math_primitives.Config())
    instructions = machine_code(program).instructions
    evidence.note("MUFU.EX2 of exp, exp2, sigmoid and softplus", instructions.of("MUFU", "EX2"), "instructions")
    x = inputs()
    found = evaluate(program, x, launch, device)
    for name, got in found.items():
        error = ulp_error(got, EXACT[name](x.double()))
        at = x[int(error.argmax())]
        evidence.note(f"{name}: largest error at", str(float(at)))
        evidence.at_most(f"{name}: error", float(error.max()), LIMITS[name], "ulp")


@pytest.mark.criterion("0.5")
def test_measure_sees_the_usual_mistakes(evidence: Evidence) -> None:
    """log(1 + exp(x)) instead of log1p loses small gates, and min() before exp turns NaN into a number."""
    x = inputs()
    want = EXACT["softplus"](x.double())
    naive = torch.where(x > math_primitives.SOFTPLUS_THRESHOLD, x, torch.log(1 + torch.exp(x)))
    evidence.at_least("softplus as log(1 + exp(x)): error", float(ulp_error(naive, want).max()), 1e3, "ulp")
    capped = torch.log1p(torch.exp(torch.fmin(x, torch.tensor(math_primitives.SOFTPLUS_THRESHOLD))))
    swallowed = ulp_error(torch.where(x > math_primitives.SOFTPLUS_THRESHOLD, x, capped), want)[x.isnan()]
    evidence.at_least("softplus with min(): error at NaN", float(swallowed.max()), 1e3, "ulp")


@pytest.mark.criterion("0.17")
def test_fast_math_is_the_same_source(machine_code: Compile, evidence: Evidence) -> None:
    exact = machine_code(Program("probes.math_primitives", math_primitives.Config()), "exact")
    fast = machine_code(Program("probes.fast_math", fast_math.Config()), "fast")
    evidence.equal("sources that differ", int(exact.lowered.sha256 != fast.lowered.sha256), 0)
    evidence.note("instructions, exact", exact.instructions.total())
    evidence.at_most("instructions, fast", fast.instructions.total(), exact.instructions.total() - 1)


@pytest.mark.sm90
@pytest.mark.criterion("0.27")
def test_fast_math_error(launch: Launch, device: torch.device, evidence: Evidence) -> None:
    """CUDA bounds the fast exponential by 2 + floor(1.173 |x|) ulp."""
    x = inputs()
    program = Program("probes.fast_math", fast_math.Config())
    for name, got in evaluate(program, x, launch, device).items():
        error = ulp_error(got, EXACT[name](x.double()))
        if name == "exp":
            inside = x.abs() <= 80
            bound = 2.5 + torch.floor(1.173 * x.double().abs())
            evidence.at_most("exp: error over its bound", float((error / bound)[inside].max()), 1.0)
        evidence.note(
            f"{name}: error, 2^-10 < |x| <= 16", float(error[(x.abs() > 2**-10) & (x.abs() <= 16)].max()), "ulp"
        )
