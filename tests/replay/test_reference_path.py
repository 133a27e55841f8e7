"""Gate 5: the same public call on CPU tensors computes the reference, at any K, V and float dtype."""

from __future__ import annotations

import pytest
import torch

from kernels import replay
from tests.gate_engine import Evidence
from tests.replay.cases import check, make, padded, run


@pytest.mark.criterion("5.13")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24), (96, 32)))
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
def test_reference_path(K: int, V: int, pool: torch.dtype, evidence: Evidence) -> None:
    case = padded(make(T=(12, 3, 0, 16), K=K, V=V, tail=2, pool=pool, pitched=True, allow_neg_eigval=True))
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.13")
def test_batched_shapes_and_allocated_output() -> None:
    case = make(T=(12, 5))
    run(case)
    o = replay.verify(
        case.A_log, case.a[None], case.dt_bias, case.q[None], case.k[None], case.v[None], case.b[None],
        case.pool.view, case.state_indices, case.cu_seqlens,
    )  # fmt: skip
    assert o.shape == (1, *case.v.shape) and o.dtype == case.v.dtype
    assert torch.equal(o[0], case.o.view)


@pytest.mark.criterion("5.13")
def test_fp64_stays_fp64(evidence: Evidence) -> None:
    case = make(T=(12, 5))
    double = {name: getattr(case, name).double() for name in ("A_log", "a", "dt_bias", "q", "k", "v", "b")}
    o = replay.verify(
        **double,
        ssm_states=case.pool.view.double(),
        cache_indices=case.state_indices,
        query_start_loc=case.cu_seqlens,
    )
    want = case.expected().o
    evidence.at_most("o of fp64 inputs, relative L2", ((o - want).norm() / want.norm()).item(), 1e-14)


@pytest.mark.criterion("5.3", "5.4")
def test_nothing_to_do() -> None:
    for case in (make(T=(), tail=3), make(T=(0, 0), tail=1), make(T=(0,))):
        run(case)
        assert not case.o.view.any()
    case = make(T=(12, 1))
    case.pool.view = case.pool.view[:0]
    run(case)
    assert not case.o.view.any()
