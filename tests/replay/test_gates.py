"""Gate 5: gate dtypes, strong and weak gates, scale, norms, the range of beta; the inputs of real layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data import RealInput, load_real_inputs
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay.cases import check, make, relative_l2, run
from tests.verify.test_gates_and_scales import EXTREMES, tame
from tests.verify.test_real_inputs import as_case

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.criterion("5.7")
@pytest.mark.parametrize(("gate", "bias"), ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)), ids=str)
def test_gate_dtypes(gate: torch.dtype, bias: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    for lengths in ((12, 5), (1, 16)):
        case = make(T=lengths, H=1, HV=2, gate=gate, bias=bias, device=device)
        run(case)
        check(case, evidence)


@pytest.mark.criterion("5.7")
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
@pytest.mark.parametrize("T", (7, 12))
def test_extreme_gates(T: int, extreme: tuple[float, ...], device: torch.device, evidence: Evidence) -> None:
    """Every second token extreme, so that strong and weak decay meet in one request."""
    case = make(N=1, T=T, pool=torch.float32, device=device)
    A_log, a, dt_bias, b = extreme
    case.A_log[0], case.dt_bias[0] = A_log, dt_bias
    case.a[::2, 0], case.b[::2, 0] = a, b
    run(case)
    assert torch.isfinite(case.o.view).all()
    want = case.expected()
    for h in (0, 1):  # alone: a head that forgets everything is small beside one that forgets nothing
        error = relative_l2(case.o.view[:, h], want.o[:, h])
        evidence.at_most("o of a head at extreme gates, relative L2", error, ROUNDING[torch.bfloat16])


OPTIONS: tuple[dict[str, Any], ...] = (
    {"scale": 0.0},
    {"scale": 1.0},
    {"scale": -0.3},
    {"use_qk_l2norm_in_kernel": False, "scale": 0.01},
    {"use_qk_l2norm_in_kernel": False},
    {"allow_neg_eigval": True},
)


@pytest.mark.criterion("5.7")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    case = tame(make(T=(12, 5), device=device, **options))
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.7")
def test_zero_keys_and_queries(device: torch.device, evidence: Evidence) -> None:
    """A zero vector has no direction: its norm is sqrt(1e-6) and it stays zero."""
    case = make(T=(12,), device=device)
    case.q[3], case.k[5], case.v[7] = 0, 0, 0
    run(case)
    check(case, evidence)
    assert not case.o.view[3].any()


@pytest.mark.costly
@pytest.mark.criterion("5.14")
@pytest.mark.parametrize("real", load_real_inputs(), ids=lambda real: real.name)
def test_real_layer(real: RealInput, device: torch.device, evidence: Evidence) -> None:
    case = as_case(real, torch.bfloat16, device)
    case.rows = torch.full_like(case.rows, -1)
    run(case)
    check(case, evidence)
