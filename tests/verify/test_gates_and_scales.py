"""Gate 3: gates in the kernel, on the host and in fp64; scale, norms and the range of beta."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import verify
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.verify.cases import Case, check, make, relative_l2

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.costly
@pytest.mark.criterion("3.10")
@pytest.mark.parametrize("fuse_gating", (True, False))
@pytest.mark.parametrize("gate", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("bias", (torch.bfloat16, torch.float32), ids=str)
def test_gate_dtypes(
    bias: torch.dtype, gate: torch.dtype, fuse_gating: bool, device: torch.device, evidence: Evidence
) -> None:
    case = make(T=(12, 5), H=1, HV=2, bias=bias, gate=gate, fuse_gating=fuse_gating, device=device)
    case.run()
    check(case, evidence)


#: (A_log, a, dt_bias, b): thresholds of softplus, underflow, overflow, no decay, full decay
EXTREMES = (
    (0.0, 20.0, 0.0, 0.0),
    (0.0, 20.5, 0.0, 0.0),
    (0.0, 88.0, 30.0, 100.0),
    (-100.0, 3.0, 0.0, -100.0),
    (100.0, -100.0, 0.0, 0.5),
    (100.0, 100.0, 100.0, 1.0),
    (2.0, -16.0, 0.0, -3.0),
    (10.0, -15.5, 0.0, 3.0),
    (89.0, -95.0, 0.0, 0.0),
)


@pytest.mark.criterion("3.10")
@pytest.mark.parametrize("fuse_gating", (True, False))
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_extreme_gates(extreme: tuple[float, ...], fuse_gating: bool, device: torch.device, evidence: Evidence) -> None:
    """Every second token extreme, so that strong and weak decay meet in one block."""
    case = make(N=1, T=12, H=1, HV=2, pool=torch.float32, fuse_gating=fuse_gating, device=device)
    A_log, a, dt_bias, b = extreme
    case.A_log[0], case.dt_bias[0] = A_log, dt_bias
    case.a[::2, 0], case.b[::2, 0] = a, b
    case.run()
    assert torch.isfinite(case.o.view).all()
    # |g| up to 1e3 before it underflows costs |g| ulps of fp32 in exp(g): hence not the limit of ordinary gates
    want = case.expected()
    stored = ~want.states.isnan()
    evidence.at_most("o at extreme gates", relative_l2(case.o.view, want.o), ROUNDING[torch.bfloat16])
    evidence.at_most("states at extreme gates", relative_l2(case.states.view[stored], want.states[stored]), 1e-5)


@pytest.mark.criterion("3.10")
def test_low_level_entry_with_host_gates(device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 5), H=1, HV=2, pool=torch.float16, device=device)
    g, beta = verify.gdn_sigmoid_gate(case.A_log, case.a, case.dt_bias, case.b)
    assert g.dtype == beta.dtype == torch.float32
    verify.fused_recurrent_gdr_verify_fwd(
        case.q, case.k, case.v, g, beta, case.pool.view, case.state_indices, case.cu_seqlens, case.o.view,
        case.states.view, case.rows,
    )  # fmt: skip
    check(case, evidence)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"scale": 0.0},
    {"scale": 1.0},
    {"scale": -0.3},
    {"use_qk_l2norm_in_kernel": False, "scale": 0.01},
    {"use_qk_l2norm_in_kernel": False, "fuse_gating": False},
    {"allow_neg_eigval": True},
    {"allow_neg_eigval": True, "fuse_gating": False},
    {"cache_steps": 12},
)


def tame(case: Case) -> Case:
    """Without the norm |k|^2 is about K and the recurrence explodes: bring k near unit length."""
    if not case.options.get("use_qk_l2norm_in_kernel", True):
        case.k.mul_(1 / 16)
    return case


@pytest.mark.criterion("3.11")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    case = tame(make(T=(12, 5), H=1, HV=2, steps=14, device=device, **options))
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.11")
def test_zero_keys_and_queries(device: torch.device, evidence: Evidence) -> None:
    """A zero vector has no direction: its norm is sqrt(1e-6) and it stays zero."""
    case = make(T=(12,), H=1, HV=2, device=device)
    case.q[3], case.k[5], case.v[7] = 0, 0, 0
    case.run()
    check(case, evidence)
    assert not case.o.view[3].any()
