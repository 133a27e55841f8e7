"""Gate 2, paged decode: outputs and states against fp64, on the emulator or the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.decode.cases import check, make, most_requests_of_the_small_tile
from tests.gate_engine import Evidence

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.criterion("2.1", "2.3")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_every_batch_size(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """From one request over the border between the two tiles to dozens."""
    border = most_requests_of_the_small_tile(pool=pool)
    assert 4 <= border < 60
    for N in (1, 2, 3, 5, 8, border - 1, border, border + 1, border + 2, 60):
        case = make(N, pool=pool, seed=N, device=device)
        case.run()
        check(case, evidence)


#: (H, HV, V, pool, dtypes of gates and bias)
SHAPES = (
    (2, 2, 64, torch.bfloat16, torch.bfloat16, torch.float32),
    (2, 4, 256, torch.bfloat16, torch.bfloat16, torch.float32),
    (1, 3, 64, torch.float16, torch.bfloat16, torch.float32),
    (2, 8, 256, torch.bfloat16, torch.float32, torch.bfloat16),
    (1, 8, 64, torch.float32, torch.bfloat16, torch.float32),
)


@pytest.mark.criterion("2.1", "2.2")
@pytest.mark.parametrize(("H", "HV", "V", "pool", "gate", "bias"), SHAPES, ids=str)
def test_heads_and_value_dims(
    H: int, HV: int, V: int, pool: torch.dtype, gate: torch.dtype, bias: torch.dtype, device: torch.device,
    evidence: Evidence,
) -> None:  # fmt: skip
    border = most_requests_of_the_small_tile(HV, V, pool)
    for N in (1, 3, border + 1):
        case = make(N, H, HV, V=V, pool=pool, gate=gate, bias=bias, seed=N, device=device)
        case.run()
        check(case, evidence)


@pytest.mark.criterion("2.2")
@pytest.mark.parametrize(("H", "HV", "V", "pool", "gate", "bias"), SHAPES, ids=str)
def test_a_value_head_reads_one_key_head(
    H: int, HV: int, V: int, pool: torch.dtype, gate: torch.dtype, bias: torch.dtype, device: torch.device
) -> None:
    """Changing q and k of a key head changes the outputs of its value heads, all of them, and no other."""
    for head in range(H):
        cases = [make(2, H, HV, V=V, pool=pool, gate=gate, bias=bias, device=device) for _ in range(2)]
        cases[1].q[:, head] *= -1
        cases[1].k[:, head] = cases[1].k[:, head].flip(-1)
        for case in cases:
            case.run()
        differ = (cases[0].o.view != cases[1].o.view).flatten(2).any(-1).all(0)
        same = (cases[0].o.view == cases[1].o.view).flatten(2).all(-1).all(0)
        mine = torch.arange(HV, device=device) // (HV // H) == head
        assert torch.equal(differ, mine) and torch.equal(same, ~mine)


@pytest.mark.criterion("2.1", "2.3")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_state_moves_to_another_slot(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    for N in (3, most_requests_of_the_small_tile(pool=pool) + 1):
        case = make(N, pool=pool, moves=True, pitched=True, seed=N, device=device)
        assert case.write is not None
        case.write[1] = case.read[1]  # one stays
        case.run()
        check(case, evidence)


@pytest.mark.criterion("2.3")
def test_states_of_many_steps(device: torch.device, evidence: Evidence) -> None:
    """Steps in place, each against fp64 from the states that the one before it stored."""
    first = make(5, pitched=True, device=device)
    for seed in range(8):
        case = make(5, pitched=True, seed=seed, device=device)
        case.pool, case.read = first.pool, first.read
        case.pool.before.copy_(case.pool.storage)
        case.run()
        check(case, evidence)
