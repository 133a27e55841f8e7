"""Gate 5: commit of CPU tensors computes the reference, at any K, V and float dtype."""

from __future__ import annotations

import pytest
import torch

from kernels import replay
from tests.gate_engine import Evidence
from tests.replay.commit_cases import again, check_commit, elsewhere, make, run
from tests.verify.cases import padded
from tests.verify.one_token import different


@pytest.mark.criterion("5.26")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24), (96, 32)))
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("moved", (False, True), ids=("in place", "moved"))
def test_reference_path(moved: bool, K: int, V: int, pool: torch.dtype, evidence: Evidence) -> None:
    accepted, lengths = (12, 2, 0, 9, 20, -1), (12, 3, 0, 16, 5, 4)
    case = make(
        accepted,
        lengths,
        K=K,
        V=V,
        slots=13,
        tail=2,
        pool=pool,
        pitched=True,
        allow_neg_eigval=True,
        bias=torch.float16,
    )
    padded(case)
    if moved:
        elsewhere(case)
    want = case.expected()
    case.k[9 + 15 + 3 : 12 + 3 + 16] = torch.nan  # rejected ones of request 3
    run(case)
    check_commit(case, evidence, want)


@pytest.mark.criterion("5.26")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24)))
def test_fp64_stays_fp64(K: int, V: int, evidence: Evidence) -> None:
    case = make((12, 3, 0), (12, 5, 2), K=K, V=V, pool=torch.float64)
    for name in ("A_log", "a", "dt_bias", "q", "k", "v", "b"):
        setattr(case, name, getattr(case, name).double())
    run(case)
    check_commit(case, evidence, limit=1e-14)


@pytest.mark.criterion("5.26")
def test_batched_shapes() -> None:
    case = make((12, 3), (12, 5))
    other = again(case)
    run(case)
    replay.commit(
        other.A_log, other.a[None], other.dt_bias, other.k[None], other.v[None], other.b[None], other.pool.view,
        other.state_indices, other.cu_seqlens, other.accepted,
    )  # fmt: skip
    assert not different(other.pool.view, case.pool.view) and case.pool.changed().any()


@pytest.mark.criterion("5.26")
def test_states_trade_places(evidence: Evidence) -> None:
    """On CPU tensors all slots are read before any is written."""
    case = make((3, 0), (5, 5))
    case.targets = case.state_indices.flip(0)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.26")
def test_nothing_to_do() -> None:
    for case in (make((), (), tail=3), make((3, 0), (0, 0), tail=1), make((1,), (0,))):
        run(case)
        assert not case.pool.differs().any()
    case = make((12, 1), (12, 1))
    case.pool.view = case.pool.view[:0]
    run(case)
    assert not case.pool.differs().any()
