"""Gate 5: verify and commit in turns, as a server calls them; and commit beside the snapshots that it replaces."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import verify
from reference.gating import gates
from reference.recurrence import recurrent
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay import cases
from tests.replay.commit_cases import Commit, check_commit, keep, make, relative_l2, run, split
from tests.verify.cases import Case
from tests.verify.test_gpu import ulps

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
ROUNDS = 6
TOKENS = (12, 5, 16, 8)


def accepted_only(case: Commit, n: int, state: Tensor) -> Tensor:
    """fp64: `state` of request n after its accepted tokens, which are all that there is."""
    start, L = int(case.cu_seqlens[n]), int(case.accepted[n])
    if not L:
        return state
    k, v, a, b = (getattr(case, name)[start : start + L].double() for name in ("k", "v", "a", "b"))
    g, beta = gates(case.A_log.double(), a, case.dt_bias.double(), b)
    return recurrent(k, k, v, g, beta, state, use_qk_l2norm=True)[1][-1]


@pytest.mark.criterion("5.25")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_rounds_of_verify_and_commit(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """Outputs of each round from the pool as it is, and the states at the end, random numbers of tokens accepted.

    The states are compared with two fp64 runs of the accepted tokens alone. One rounds its state to the pool's dtype
    after each commit: what differs then is the arithmetic of all rounds, which no token makes larger
    (|exp(g) (I - beta k k^T)| <= 1) and decay makes smaller; it stays below one rounding. The other never rounds:
    roundings of different rounds are independent, so at most their squares add up.
    """
    rng = torch.Generator().manual_seed(5)
    first = make([0] * len(TOKENS), TOKENS, pool=pool, device=device)
    start = first.pool.view[first.state_indices].double()
    rounded, exact = list(start), list(start)
    for seed in range(ROUNDS):
        accepted = [int(torch.randint(T + 1, (1,), generator=rng)) for T in TOKENS]
        case = make(accepted, TOKENS, pool=pool, seed=seed, device=device)
        case.A_log, case.dt_bias, case.state_indices = first.A_log, first.dt_bias, first.state_indices
        case.pool = first.pool
        want = keep(case).expected()
        o = cases.run(case)
        evidence.at_most("o of a round, relative L2 against fp64", relative_l2(o, want.o), ROUNDING[torch.bfloat16])
        run(case)
        check_commit(case, evidence, want)
        rounded = [accepted_only(case, n, state).to(pool).double() for n, state in enumerate(rounded)]
        exact = [accepted_only(case, n, state) for n, state in enumerate(exact)]
    for n, slot in enumerate(first.state_indices.tolist()):
        name = f"{str(pool)[6:]} state after {ROUNDS} rounds, relative L2 against"
        found = first.pool.view[slot]
        evidence.at_most(f"{name} fp64 that rounds as often", relative_l2(found, rounded[n]), ROUNDING[pool])
        evidence.at_most(f"{name} fp64", relative_l2(found, exact[n]), ROUNDS**0.5 * ROUNDING[pool])


#: largest difference in units of the last place: a changed rounding, and in fp32 the arithmetic of two programs
SNAPSHOT_ULPS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 1024}
#: and relative L2: few roundings are changed ones
SNAPSHOT_L2 = {torch.bfloat16: 5e-4, torch.float16: 1e-4, torch.float32: 1e-6}


@pytest.mark.costly
@pytest.mark.criterion("5.25")
@pytest.mark.parametrize("ctas", (None, 3))
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_commit_is_the_snapshot(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After L tokens as `recurrent_gated_delta_rule_verify` keeps it for token L - 1."""
    split(monkeypatch, ctas)
    case = make(range(1, 13), 12, pool=pool, device=device)
    case.run()
    assert not case.pool.changed().any()
    run(case)
    for n, slot in enumerate(case.state_indices.tolist()):
        found, snapshot = case.pool.view[slot], case.states.view[n, n]
        name = f"{str(pool)[6:]} state and snapshot"
        evidence.at_most(f"{name}, largest difference", ulps(found, snapshot), SNAPSHOT_ULPS[pool], "ulp")
        evidence.at_most(f"{name}, relative L2", relative_l2(found, snapshot.double()), SNAPSHOT_L2[pool])


@pytest.mark.criterion("5.25")
def test_accepting_everything_is_a_verify_that_commits(device: torch.device, evidence: Evidence) -> None:
    case = make((12, 1, 7), (12, 1, 7), device=device)
    fields: dict[str, Any] = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    other = make((12, 1, 7), (12, 1, 7), device=device)
    committing = Case(**{**fields, "pool": other.pool, "options": {"disable_state_update": False}})
    committing.run(verify.recurrent_gated_delta_rule_verify)
    run(case)
    found, want = case.pool.view, committing.pool.view
    evidence.at_most("state of a verify that commits, largest difference", ulps(found, want), 1, "ulp")
