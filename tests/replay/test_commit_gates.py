"""Gate 5: commit with gates of all dtypes, strong and weak, without norms, with beta in (0, 2); real layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.data import RealInput, load_real_inputs
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay.commit_cases import Commit, check_commit, make, relative_l2, run
from tests.verify.cases import Case
from tests.verify.test_gates_and_scales import EXTREMES
from tests.verify.test_real_inputs import as_case

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize(("gate", "bias"), ((torch.float32, torch.bfloat16), (torch.float16, torch.float16)), ids=str)
def test_gate_dtypes(gate: torch.dtype, bias: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    case = make((12, 3, 1, 16), (12, 5, 1, 16), H=1, HV=2, gate=gate, bias=bias, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_extreme_gates(extreme: tuple[float, ...], device: torch.device, evidence: Evidence) -> None:
    """Every second token extreme, so that strong and weak decay meet in one request; the last one either of them."""
    case = make((7, 12, 16), 16, pool=torch.float32, device=device)
    A_log, a, dt_bias, b = extreme
    case.A_log[0], case.dt_bias[0] = A_log, dt_bias
    case.a[::2, 0], case.b[::2, 0] = a, b
    run(case)
    want = case.expected()
    for n, (slot, L) in enumerate(zip(case.state_indices.tolist(), case.accepted.tolist(), strict=True)):
        found = case.pool.view[slot]
        assert torch.isfinite(found).all()
        for h in (0, 1):  # alone: a head that forgets everything is small beside one that forgets nothing
            error = relative_l2(found[h], want.states[n, L - 1, h])
            evidence.at_most("state of a head at extreme gates, relative L2", error, ROUNDING[torch.float32])


OPTIONS: tuple[dict[str, Any], ...] = (
    {"use_qk_l2norm_in_kernel": False},
    {"allow_neg_eigval": True},
    {"use_qk_l2norm_in_kernel": False, "allow_neg_eigval": True},
)


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    case = make((12, 2, 16), (12, 5, 16), device=device, **options)
    if not options.get("use_qk_l2norm_in_kernel", True):
        case.k.mul_(1 / 16)  # near unit length, else the recurrence explodes
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("zero", ("k", "v"))
def test_zero_keys_and_values(zero: str, device: torch.device, evidence: Evidence) -> None:
    """A zero key has no direction: its norm is sqrt(1e-6), and its token is a decay and nothing else."""
    case = make((12, 1), 12, device=device)
    getattr(case, zero)[5] = 0
    getattr(case, zero)[12] = 0
    run(case)
    check_commit(case, evidence)


def as_commit(case: Case, accepted: int) -> Commit:
    """A verify of one request as a commit of its first tokens."""
    case.rows = torch.zeros_like(case.rows)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    return Commit(**fields, accepted=torch.full_like(case.state_indices, accepted), targets=None)


@pytest.mark.costly
@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("real", load_real_inputs(), ids=lambda real: real.name)
def test_real_layer(real: RealInput, device: torch.device, evidence: Evidence) -> None:
    for accepted in (1, len(real.v) // 2, len(real.v)):
        case = as_commit(as_case(real, torch.bfloat16, device), accepted)
        run(case)
        check_commit(case, evidence)


@pytest.mark.criterion("5.23")
def test_a_head_alone_is_as_exact(device: torch.device, evidence: Evidence) -> None:
    """Each head of each request at the limit of its dtype, not only all of them together."""
    for pool in (torch.bfloat16, torch.float32):
        case = make((16, 12, 1), 16, pool=pool, seed=3, device=device)
        run(case)
        want = case.expected()
        for n, (slot, L) in enumerate(zip(case.state_indices.tolist(), case.accepted.tolist(), strict=True)):
            for h in range(4):
                error = relative_l2(case.pool.view[slot, h], want.states[n, L - 1, h])
                evidence.at_most(f"state of a head in {str(pool)[6:]}, relative L2", error, ROUNDING[pool])
