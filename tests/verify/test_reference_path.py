"""Gate 3: the same public call on CPU tensors computes the reference, at any K, V and float dtype."""

from __future__ import annotations

import pytest
import torch

from kernels import verify
from tests.gate_engine import Evidence
from tests.verify.cases import check, make


@pytest.mark.criterion("3.22")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24), (96, 32)))
@pytest.mark.parametrize("fuse_gating", (True, False))
def test_reference_path(K: int, V: int, fuse_gating: bool, evidence: Evidence) -> None:
    case = make(T=(12, 0, 20), K=K, V=V, fuse_gating=fuse_gating, disable_state_update=False)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.22")
def test_batched_shapes_and_allocated_output() -> None:
    case = make(T=(12, 5))
    case.run()
    args = (case.A_log, case.a[None], case.dt_bias, case.q[None], case.k[None], case.v[None], case.b[None])
    paging = (case.pool.view, case.state_indices, case.cu_seqlens, case.states.view, case.rows)
    o = verify.recurrent_gated_delta_rule_verify(*args, *paging)
    assert o.shape == (1, *case.v.shape) and o.dtype == case.v.dtype
    assert torch.equal(o[0], case.o.view)


@pytest.mark.criterion("3.22")
def test_fp64_stays_fp64(evidence: Evidence) -> None:
    case = make(T=(12, 5))
    double = {name: getattr(case, name).double() for name in ("A_log", "a", "dt_bias", "q", "k", "v", "b")}
    o = verify.recurrent_gated_delta_rule_verify(
        **double,
        ssm_states=case.pool.view.double(),
        cache_indices=case.state_indices,
        query_start_loc=case.cu_seqlens,
        intermediate_states_buffer=torch.zeros(case.states.view.shape, dtype=torch.float64),
        intermediate_state_indices=case.rows,
    )
    error = ((o - case.expected().o).norm() / o.norm()).item()
    evidence.at_most("o of fp64 inputs, relative L2", error, 1e-14)
