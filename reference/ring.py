"""Verify behind a ring of accepted tokens that the state in the pool does not hold yet.

Shapes as in reference/pool.py, and of every slot a ring of R rows: ring_k [slots, R, H, K], ring_v [slots, R, HV, V],
ring_a, ring_b [slots, R, HV]; cursors int32 [slots, 4] = base, folding, live, fold; marks int32 [slots, HV, parts].

From row `base` on (rows are counted modulo R) lie `folding` tokens that the next verify applies to the state in the
pool, `live` tokens of history behind them, and the new tokens of the last verify behind those. `marks` holds the number
`fold` of the last fold that was carried out, so that a verify can be repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.gating import gates as raw_gates
from reference.pool import Gates
from reference.recurrence import Recurrence, recurrent

CURSORS = 4  # of a slot
BASE, FOLDING, LIVE, FOLD = range(CURSORS)  # FOLD is the number of folds asked for


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    ring: tuple[Tensor, Tensor, Tensor, Tensor],
    cursors: Tensor,
    marks: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = recurrent,
    gates: Gates = raw_gates,
) -> None:
    """Fold what has to be folded, keep the new tokens behind the history, and write the outputs of the new tokens.

    The state after a fold is rounded to the pool's dtype, and outputs follow from the rounded one.
    """
    R = ring[0].shape[1]
    starts = cu_seqlens.tolist()
    o.zero_()

    def run(queries: Tensor, kept: tuple[Tensor, ...], slot: int) -> tuple[Tensor, Tensor]:
        keys, values, x, y = (tensor.to(dtype) for tensor in kept)
        g, beta = gates(A_log.to(dtype), x, dt_bias.to(dtype), y, allow_neg_eigval)
        return recurrence(
            queries.to(dtype), keys, values, g, beta, ssm_states[slot].to(dtype), scale=scale,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )  # fmt: skip

    for n, slot in enumerate(state_indices.tolist()):
        if not 0 <= slot < len(ssm_states):
            continue
        base, folding, live, fold = cursors[slot].tolist()
        if folding and bool((marks[slot] != fold).any()):
            old = tuple(x[slot, (torch.arange(base, base + folding, device=x.device)) % R] for x in ring)
            ssm_states[slot] = run(old[0], old, slot)[1][-1].to(ssm_states.dtype)
            marks[slot] = fold
        tokens = slice(starts[n], starts[n + 1])
        length = tokens.stop - tokens.start
        if not length:
            continue
        first = base + folding
        rows = torch.arange(first, first + live + length, device=cursors.device) % R
        for x, new in zip(ring, (k, v, a, b), strict=True):
            x[slot, rows[live:]] = new[tokens].to(x.dtype)
        kept = tuple(x[slot, rows] for x in ring)
        queries = torch.cat((kept[0][:live].to(q.dtype), q[tokens]))  # outputs of the history are not wanted
        o[tokens] = run(queries, kept, slot)[0][live:].to(o.dtype)


def accept(
    cursors: Tensor, state_indices: Tensor, accepted: Tensor, *, rows: int, capacity: int, max_tokens: int
) -> None:
    """Move the cursors by the tokens that were accepted of the last verify: accepted int [N], 0 to max_tokens.

    A history that would grow beyond `capacity` is folded by the next verify, and the accepted tokens begin another.
    """
    for slot, length in zip(state_indices.tolist(), accepted.tolist(), strict=True):
        if not 0 <= slot < len(cursors):
            continue
        length = max(0, min(length, max_tokens))
        base, folding, live, fold = cursors[slot].tolist()
        base = (base + folding) % rows
        fits = live + length <= capacity
        after = (base, 0, live + length, fold) if fits else (base, live, length, fold + 1)
        cursors[slot] = torch.tensor(after, dtype=cursors.dtype, device=cursors.device)
