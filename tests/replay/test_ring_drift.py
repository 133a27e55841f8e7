"""Gate 5: over 10,000 tokens a state that is stored once in several steps stays nearer to fp64 than one that is stored
after every token. References alone."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from kernels.replay import ring
from reference.gating import gates, l2norm
from reference.recurrence import delta_step
from tests.gate_engine import Evidence
from tests.verify.cases import relative_l2

TOKENS = 10_000
POOL = torch.bfloat16
K = V = 16
#: softplus(dt_bias) of the heads, with A = 1: they remember thousands of tokens, hundreds and tens
DT = (1e-3, 1e-2, 1e-1)
HV = len(DT)


@functools.cache
def inputs() -> tuple[Tensor, ...]:
    """A_log, dt_bias, and q, k, v, a, b of one random sequence; gates as in tests/reference/drift.py."""
    rng = torch.Generator().manual_seed(7)
    dt = torch.tensor(DT)
    dt_bias = dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
    q, k = (torch.randn(TOKENS, 1, K, generator=rng).to(POOL) for _ in range(2))
    v = torch.randn(TOKENS, HV, V, generator=rng).to(POOL)
    a, b = (torch.randn(TOKENS, HV, generator=rng).to(POOL) for _ in range(2))
    return torch.zeros(HV), dt_bias, q, k, v, a, b


def one_by_one(dtype: torch.dtype, pool: torch.dtype) -> Tensor:
    """The state after every token, [TOKENS, HV, V, K], computed in `dtype` and stored in `pool`'s after each."""
    A_log, dt_bias, _, k, v, a, b = (x.to(dtype) for x in inputs())
    g, beta = gates(A_log, a, dt_bias, b)
    k = l2norm(k).expand(-1, HV, -1)
    state, states = torch.zeros(HV, V, K, dtype=pool), torch.empty(TOKENS, HV, V, K, dtype=pool)
    for t in range(TOKENS):
        state = delta_step(state.to(dtype), k[t], k[t], v[t], g[t], beta[t])[0].to(pool)
        states[t] = state
    return states


def behind_a_ring(capacity: int, accepted_at_once: int) -> list[tuple[int, Tensor]]:
    """The state of the pool after every fold and how many tokens it holds, all tokens accepted."""
    A_log, dt_bias, q, k, v, a, b = inputs()
    pool = torch.zeros(1, HV, V, K, dtype=POOL)
    window = ring.Window.allocate(pool, 1, max_tokens=accepted_at_once, capacity=capacity)
    slot, folded, found = torch.zeros(1, dtype=torch.int32), 0, []
    for start in range(0, TOKENS, accepted_at_once):
        new = slice(start, min(start + accepted_at_once, TOKENS))
        count = new.stop - start
        due = int(window.cursors[0, 1])
        ring.verify(
            A_log, a[new], dt_bias, q[new], k[new], v[new], b[new], pool, slot,
            torch.tensor([0, count], dtype=torch.int32), window,
        )  # fmt: skip
        if due:
            folded += due
            found.append((folded, pool[0].clone()))
        ring.accept(window, slot, torch.tensor([count], dtype=torch.int32))
    assert folded > TOKENS - 2 * 16
    return found


@pytest.mark.criterion("5.34")
def test_it_drifts_less_than_a_decode_that_stores(evidence: Evidence) -> None:
    """Roundings add up as independent errors, as long as the state remembers them: with a sixteenth of them the
    distance from fp64 is a quarter, until the last rounding alone is all of it."""
    exact, decode = one_by_one(torch.float64, torch.float64), one_by_one(torch.float32, POOL)
    folds = behind_a_ring(capacity=16, accepted_at_once=4)
    evidence.at_least("folds", len(folds), TOKENS / 16 - 2)
    later = [(tokens, state) for tokens, state in folds if tokens >= 1000]
    for h, dt in enumerate(DT):
        of_ring = [relative_l2(state[h], exact[tokens - 1, h]) for tokens, state in later]
        of_decode = [relative_l2(decode[tokens - 1, h], exact[tokens - 1, h]) for tokens, _ in later]
        evidence.note(f"decode, dt {dt}: largest relative L2 from fp64", max(of_decode))
        evidence.note(f"ring, dt {dt}: largest relative L2 from fp64", max(of_ring))
        ratios = [x / y for x, y in zip(of_ring, of_decode, strict=True)]
        evidence.at_most(f"ring over decode, dt {dt}: largest ratio at any fold", max(ratios), 1.0)
        if dt < 0.1:
            mean = math.prod(ratios) ** (1 / len(ratios))
            evidence.at_most(f"ring over decode, dt {dt}: geometric mean of the ratios", mean, 0.5)
