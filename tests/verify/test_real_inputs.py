"""Gate 3 on the tensors that real Qwen3-Next and Qwen3.5 layers handed to their recurrence."""

from __future__ import annotations

import pytest
import torch

from tests.data import RealInput, load_real_inputs
from tests.gate_engine import Evidence
from tests.verify.cases import Buffer, Case, check

pytestmark = pytest.mark.usefixtures("emulator")


def as_case(real: RealInput, pool: torch.dtype, device: torch.device) -> Case:
    T, HV, V = real.v.shape
    slots = torch.zeros(3, *real.state.shape, dtype=pool, device=device)
    slots[1] = real.state
    index = torch.tensor([1], dtype=torch.int32, device=device)
    return Case(
        q=real.q.to(device),
        k=real.k.to(device),
        v=real.v.to(device),
        a=real.a.to(device),
        b=real.b.to(device),
        A_log=real.A_log.to(device),
        dt_bias=real.dt_bias.to(device),
        pool=Buffer.make(slots),
        state_indices=index,
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device=device),
        o=Buffer.make(torch.full((T, HV, V), torch.nan, dtype=torch.bfloat16, device=device)),
        states=Buffer.make(torch.full((2, T, *real.state.shape), torch.nan, dtype=pool, device=device)),
        rows=index,
        options={},
    )


@pytest.mark.costly
@pytest.mark.criterion("3.18")
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("real", load_real_inputs(), ids=lambda real: real.name)
def test_real_layer(real: RealInput, pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    case = as_case(real, pool, device)
    case.run()
    check(case, evidence)
