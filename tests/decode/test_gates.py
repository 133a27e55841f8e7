"""Gate 2, paged decode: gates at their extremes and in every dtype; scale, norms, the range of beta."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.decode.cases import check, make
from tests.gate_engine import Evidence
from tests.verify.test_gates_and_scales import EXTREMES

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)

#: (dtype of a and b, of dt_bias): every dtype of both
DTYPES = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
)
#: |g| up to 1e3 before exp(g) underflows costs |g| ulps of fp32 in exp(g), and |x| ulps in exp(x)
AT_EXTREMES = 2e-5


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize(("gate", "bias"), DTYPES, ids=str)
def test_gate_dtypes(gate: torch.dtype, bias: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    for seed in range(4):
        case = make(9, 1, 2, V=64, pool=torch.float32, gate=gate, bias=bias, pitched=True, seed=seed, device=device)
        case.run()
        check(case, evidence)


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
@pytest.mark.parametrize(("gate", "bias"), DTYPES, ids=str)
def test_extreme_gates(
    gate: torch.dtype, bias: torch.dtype, extreme: tuple[float, ...], device: torch.device, evidence: Evidence
) -> None:
    """One head extreme in every second request, the other one and the others ordinary."""
    case = make(4, 1, 2, V=64, pool=torch.float32, gate=gate, bias=bias, device=device)
    A_log, a, dt_bias, b = extreme
    case.A_log[0], case.dt_bias[0] = A_log, dt_bias
    case.a[::2, 0], case.b[::2, 0] = a, b
    case.run()
    assert torch.isfinite(case.o.view).all() and torch.isfinite(case.pool.view).all()
    check(case, evidence, arithmetic=AT_EXTREMES)


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize(("gate", "bias"), DTYPES, ids=str)
def test_gates_from_minus_100_to_100(
    gate: torch.dtype, bias: torch.dtype, device: torch.device, evidence: Evidence
) -> None:
    """A grid of A_log and dt_bias over calls and heads, a and b over requests."""
    grid = torch.tensor([-100.0, -30.0, -16.5, -16.0, -15.5, -4.0, 0.0, 4.0, 10.0, 19.5, 20.0, 20.5, 40.0, 100.0])
    pairs = list(itertools.product((-100.0, -20.0, -3.0, 0.0, 3.0, 20.0, 100.0), (-100.0, -10.0, 0.0, 10.0, 100.0)))
    if len(pairs) % 2:
        pairs.append((0.0, 0.5))
    compared = 0
    for heads in zip(pairs[::2], pairs[1::2], strict=True):
        case = make(len(grid), 1, 2, V=64, pool=torch.float32, gate=gate, bias=bias, device=device)
        case.A_log[:], case.dt_bias[:] = torch.tensor(heads).T.to(device)
        case.a[:], case.b[:] = grid[:, None], grid.flip(0)[:, None]
        case.run()
        assert torch.isfinite(case.o.view).all() and torch.isfinite(case.pool.view).all()
        check(case, evidence, arithmetic=AT_EXTREMES)
        compared += case.a.numel()
    evidence.at_least("combinations of A_log, dt_bias and a", compared, 400)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.0},
    {"scale": 1.0},
    {"scale": -0.3},
    {"scale": 1e4},
    {"allow_neg_eigval": True},
    {"allow_neg_eigval": True, "scale": 2.0},
)


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("packed", (False, True), ids=("separate", "packed"))
def test_options(packed: bool, options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    case = make(6, device=device, **options)
    case.b[0] = 50.0  # beta is 1, or 2
    if packed:
        case.run_packed()
    else:
        case.run()
    check(case, evidence)
    if options.get("scale") == 0.0:
        assert not case.o.view.any()


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("scale", (None, 0.0, 0.02))
def test_without_the_norm(scale: float | None, pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    for N in (4, 70):
        case = make(N, 1, 2, pool=pool, use_qk_l2norm_in_kernel=False, scale=scale, device=device)
        case.run()
        check(case, evidence)


@pytest.mark.criterion("2.5")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_zero_keys_and_queries(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """A zero vector has no direction: its norm is sqrt(1e-6) and it stays zero."""
    case = make(5, pool=pool, device=device)
    case.q[0], case.k[1], case.v[2] = 0, 0, 0
    case.q[3], case.k[3] = 0, 0
    case.run()
    check(case, evidence)
    assert not case.o.view[[0, 3]].any()


@pytest.mark.criterion("2.5")
def test_faint_keys_and_queries(device: torch.device, evidence: Evidence) -> None:
    """Squares about as small as the 1e-6 that the norm adds, and far smaller."""
    case = make(6, pool=torch.float32, device=device)
    factors = torch.tensor([2.0**-12, 2.0**-13, 2.0**-14, 2.0**-20, 2.0**-60, 1.0], device=device)[:, None, None]
    case.q *= factors
    case.k *= factors
    case.run()
    check(case, evidence)
