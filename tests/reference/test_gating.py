"""The gates and norms against arbitrary precision, where naive code overflows, underflows or rounds."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from reference import gating
from reference.recurrence import recurrent, softmax_scale
from tests.gate_engine import Evidence
from tests.reference import exact
from tests.reference.cases import Case

XS = [-1100.0, -745.0, -104.0, -88.8, -40.0, -20.5, -20.0, -16.6, -9.0, -1.0, -1e-4, 0.0, 1e-4, 0.7, 3.0]
XS += [12.0, 19.999, 20.0, 20.001, 33.0, 88.8, 104.0, 709.0, 710.0, 1100.0]
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
both = pytest.mark.parametrize("dtype", UNIT, ids=str)


def rounded(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=dtype).item()


@pytest.mark.criterion("1.6")
@both
def test_softplus(dtype: torch.dtype, evidence: Evidence) -> None:
    """4 ulp: one rounding each of exp and log1p, which are good to an ulp. Below the normal range: half a subnormal."""
    smallest = torch.finfo(dtype).tiny
    for x, y in zip(XS, gating.softplus(torch.tensor(XS, dtype=dtype)).tolist(), strict=True):
        with mpmath.workdps(exact.DIGITS):
            expected = exact.softplus(rounded(x, dtype))
        if expected > smallest:
            evidence.at_most(f"softplus {dtype} error", exact.rel_error(y, expected) / UNIT[dtype], 4, "u")
        else:
            assert 0 <= y <= smallest


@pytest.mark.criterion("1.6")
def test_softplus_is_torchs() -> None:
    x = torch.linspace(-60, 60, 4001, dtype=torch.float64)
    torch.testing.assert_close(gating.softplus(x), torch.nn.functional.softplus(x), rtol=4 * 2.0**-53, atol=0.0)
    assert math.isnan(gating.softplus(torch.tensor(math.nan)).item())


@pytest.mark.criterion("1.6")
@both
@pytest.mark.parametrize("A_log", [-8.0, -2.5, 0.0, 2.75, 30.0])
def test_log_decay(A_log: float, dtype: torch.dtype, evidence: Evidence) -> None:
    """Allowed: 8 roundings, and the rounding of the exponent A_log + x in the tail, which exp turns into a factor."""
    bias = rounded(0.3, dtype)
    a = torch.tensor(XS, dtype=dtype)
    g = gating.log_decay(torch.tensor(A_log, dtype=dtype), a, torch.tensor(bias, dtype=dtype))
    for x, y in zip((a + bias).tolist(), g.tolist(), strict=True):
        expected = exact.log_decay(A_log, x, 0.0)
        if abs(expected) > torch.finfo(dtype).tiny:
            allowed = 8 + (abs(A_log + x) if x < -20 else 0)
            error = exact.rel_error(y, expected) / UNIT[dtype]
            evidence.at_most(f"log_decay {dtype} error / allowed", error / allowed, 1.0)
        else:
            assert -torch.finfo(dtype).tiny <= y <= 0


@pytest.mark.criterion("1.6")
def test_log_decay_agrees_with_the_plain_formula(evidence: Evidence) -> None:
    A_log = torch.linspace(-8, 4, 25, dtype=torch.float64)[:, None]
    x = torch.linspace(-300, 300, 2401, dtype=torch.float64)
    plain = -torch.exp(A_log) * torch.nn.functional.softplus(x)
    g = gating.log_decay(A_log, x, torch.zeros((), dtype=torch.float64))
    evidence.at_most(
        "largest rel difference to the plain formula, fp64", ((g - plain) / plain).abs().max().item(), 1e-13
    )


@pytest.mark.criterion("1.6")
@both
def test_infinity_never_meets_zero(dtype: torch.dtype) -> None:
    """exp(A_log) overflows and softplus(x) vanishes: the product is exp(A_log + x), never NaN."""
    A_log = torch.tensor([100.0, 1000.0, 1000.0, 1000.0], dtype=dtype)
    x = torch.tensor([-160.0, -1100.0, -2500.0, 5.0], dtype=dtype)
    g = gating.log_decay(A_log, x, torch.zeros_like(x)).tolist()
    assert g[0] == pytest.approx(-math.exp(-60), rel=1e-5)
    assert g[1] == pytest.approx(-math.exp(-100), rel=1e-5)
    assert g[2] == 0.0
    assert g[3] == -math.inf and math.exp(g[3]) == 0.0


@pytest.mark.criterion("1.6")
@both
def test_beta(dtype: torch.dtype, evidence: Evidence) -> None:
    b = torch.tensor([x for x in XS if abs(x) < 40], dtype=dtype)
    for x, y in zip(b.tolist(), gating.beta(b).tolist(), strict=True):
        evidence.at_most(f"beta {dtype} error", exact.rel_error(y, exact.sigmoid(x)) / UNIT[dtype], 4, "u")
    assert torch.equal(gating.beta(b, allow_neg_eigval=True), 2 * gating.beta(b))
    extreme = gating.beta(torch.tensor([-1e30, 1e30, -math.inf, math.inf], dtype=dtype))
    assert extreme.tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.criterion("1.6")
def test_bf16_gates_are_widened_first() -> None:
    """a + dt_bias = 1 + 2^-8 is not a bf16 value; nor is sigmoid(b) rounded to bf16."""
    a, bias, b = (torch.tensor(x, dtype=torch.bfloat16) for x in (1.0, 2.0**-8, 0.3))
    g, beta = gating.gates(torch.tensor(0.0), a, bias, b)
    assert g.dtype == beta.dtype == torch.float32
    assert g.item() == pytest.approx(-math.log1p(math.exp(1 + 2**-8)), rel=1e-6)
    assert beta.item() == pytest.approx(1 / (1 + math.exp(-b.item())), rel=1e-6)


@pytest.mark.criterion("1.7")
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-4, 1e-3, 1.0, 1e4])
def test_l2norm(size: float, evidence: Evidence) -> None:
    x = size * torch.linspace(-1, 2, 7, dtype=torch.float64)
    with mpmath.workdps(exact.DIGITS):
        root = mpmath.sqrt(sum((mpmath.mpf(y) ** 2 for y in x.tolist()), mpmath.mpf("1e-6")))
        expected = [mpmath.mpf(y) / root for y in x.tolist()]
    for y, z in zip(gating.l2norm(x).tolist(), expected, strict=True):
        evidence.at_most("l2norm fp64 rel error", exact.rel_error(y, z), 8 * 2.0**-53)


@pytest.mark.criterion("1.7")
def test_scale() -> None:
    assert softmax_scale(None, 64) == 0.125
    assert softmax_scale(0.0, 64) == 0.0
    inputs = Case(5, 2, 4, 24, 40).inputs()
    o, states = recurrent(**inputs)
    o_zero, states_zero = recurrent(**{**inputs, "scale": 0.0})
    assert o_zero.count_nonzero() == 0 and torch.equal(states, states_zero)
    o_one, states_one = recurrent(**{**inputs, "scale": 1.0})
    torch.testing.assert_close(o_one, o * 24**0.5, rtol=1e-12, atol=0.0)
    assert torch.equal(states, states_one)
