"""Gate 4: the same calls on CPU tensors compute the reference, at any K, V and float dtype."""

from __future__ import annotations

import pytest
import torch

from kernels import prepass
from reference import gating
from tests.gate_engine import Evidence
from tests.prepass.cases import OUTPUTS, check, make
from tests.verify import cases


@pytest.mark.criterion("4.9")
@pytest.mark.parametrize("K", (16, 128))
def test_low_level(K: int, evidence: Evidence) -> None:
    case = make(13, K=K, allow_neg_eigval=True)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("4.9")
def test_fp64_stays_fp64(evidence: Evidence) -> None:
    case = make(13, out=torch.float64)
    q, k, a, b, A_log, dt_bias = (x.double() for x in case.inputs)
    prepass.fused_recurrent_gdr_verify_prepass(q, k, a, b, A_log, dt_bias, *(out.view for out in case.outputs))
    wanted = (*gating.gates(A_log, a, dt_bias, b), gating.inverse_norm(q), gating.inverse_norm(k))
    for name, out, want in zip(OUTPUTS, case.outputs, wanted, strict=True):
        evidence.at_most(f"{name} in fp64, relative L2", cases.relative_l2(out.view, want), 1e-15)


@pytest.mark.criterion("4.9")
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("l2norm", (True, False))
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24)))
def test_bits_behind_a_prepass(K: int, V: int, l2norm: bool, pool: torch.dtype, evidence: Evidence) -> None:
    alone, behind = (
        cases.make(
            T=(12, 0, 20), tail=2, K=K, V=V, pool=pool, prepass=prepass, use_qk_l2norm_in_kernel=l2norm,
            disable_state_update=False,
        )
        for prepass in (False, True)
    )  # fmt: skip
    for case in (alone, behind):
        case.k.mul_(1 / 16)  # near unit length, which matters without the norm
        case.run()
    for name in ("o", "states", "pool"):
        x, y = (getattr(case, name).storage for case in (alone, behind))
        changed = int((x.view(torch.uint8) != y.view(torch.uint8)).sum())
        evidence.equal(f"{name}: bytes that differ behind a prepass", changed, 0)
