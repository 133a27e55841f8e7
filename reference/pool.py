"""Verify, decode and commit on a paged pool of states: what is read, what is stored, what stays untouched.

Shapes used throughout: NT packed tokens of N requests; pool `ssm_states` [slots, HV, V, K] and snapshots
`intermediate_states` [rows, D, HV, V, K], any strides and float dtype; q, k [NT, H, K]; v, o [NT, HV, V];
a, b, g, beta [NT, HV]; `state_indices` int32 [N], `cu_seqlens` int32 [N + 1].

An index outside its buffer, in practice -1, marks padding: nothing is read or stored through it.

Arithmetic, the carried state and the gates are in `dtype` from the first token of a call to the last. Only
what is stored (o, snapshots, pool slots) is rounded to the buffer's own dtype, so fp64 buffers with
dtype=torch.float64 show the unrounded result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference.gating import gates as raw_gates
from reference.recurrence import Recurrence, recurrent

Gates = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def verify_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    intermediate_states: Tensor | None = None,
    intermediate_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    commit: bool = False,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = recurrent,
) -> None:
    """Run every request's tokens from its pool slot; write `o` and, where given, the snapshots.

    - Request n's tokens are cu_seqlens[n] .. cu_seqlens[n + 1]; with none, nothing of n is read or stored.
    - o is written whole: zero for padded requests (whatever their inputs hold) and beyond cu_seqlens[-1].
    - The state after token t goes to intermediate_states[intermediate_indices[n], t] if t < D. No other row
      or step is touched. The index may be longer than N; None is 0, 1, ...
    - Without `commit` the pool is not written. With it, the last state goes to the request's slot.
    - Every request reads the pool as it was at entry; of several that commit to one slot the last wins.
    """
    rows = range(len(state_indices)) if intermediate_indices is None else intermediate_indices.tolist()
    starts = cu_seqlens.tolist()
    committed: list[tuple[int, Tensor]] = []
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    o.zero_()
    for n, slot in enumerate(state_indices.tolist()):
        tokens = slice(starts[n], starts[n + 1])
        length = tokens.stop - tokens.start
        if not 0 <= slot < len(ssm_states) or length == 0:
            continue
        out, states = recurrence(
            q[tokens],
            k[tokens],
            v[tokens],
            g[tokens],
            beta[tokens],
            ssm_states[slot].to(dtype),
            scale=scale,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        o[tokens] = out.to(o.dtype)
        if intermediate_states is not None and 0 <= rows[n] < len(intermediate_states):
            steps = min(length, intermediate_states.shape[1])
            intermediate_states[rows[n], :steps] = states[:steps].to(intermediate_states.dtype)
        if commit:
            committed.append((slot, states[-1]))
    for slot, state in committed:
        ssm_states[slot] = state.to(ssm_states.dtype)


def verify_gated_fwd(
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
    intermediate_states: Tensor | None = None,
    intermediate_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    commit: bool = False,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = recurrent,
    gates: Gates = raw_gates,
) -> None:
    """`verify_fwd` from the raw gates a, b [NT, HV] with A_log, dt_bias [HV]; see gating.gates."""
    g, beta = gates(A_log.to(dtype), a.to(dtype), dt_bias.to(dtype), b.to(dtype), allow_neg_eigval)
    verify_fwd(
        q,
        k,
        v,
        g,
        beta,
        ssm_states,
        state_indices,
        cu_seqlens,
        o,
        intermediate_states,
        intermediate_indices,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        commit=commit,
        dtype=dtype,
        recurrence=recurrence,
    )


def verify_paged_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    slots: Tensor,
    accepted: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    *,
    lowest_slot: int = 0,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`verify_gated_fwd` with the state after token t in ssm_states[slots[n, t]]; slots int32 [N, D].

    The first state is in column accepted[n] - 1, which is brought into 0 .. D - 1. Slots below `lowest_slot` are none.
    All reads precede all writes.
    """
    N, D = slots.shape
    slots = torch.where((slots < lowest_slot) | (slots >= len(ssm_states)), -1, slots)
    first = (accepted.long() - 1).clamp(0, D - 1)
    read = slots.gather(1, first[:, None])[:, 0]
    after = ssm_states.new_empty(N, D, *ssm_states.shape[1:])
    verify_gated_fwd(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        ssm_states,
        read,
        cu_seqlens,
        o,
        after,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        dtype=dtype,
    )
    lengths = torch.diff(cu_seqlens)
    for n, t in torch.cartesian_prod(torch.arange(N), torch.arange(D)).tolist():
        if read[n] >= 0 and t < lengths[n] and slots[n, t] >= 0:
            ssm_states[slots[n, t]] = after[n, t]


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    read_indices: Tensor,
    o: Tensor,
    write_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = recurrent,
    gates: Gates = raw_gates,
) -> None:
    """One token per request: q, k [N, H, K], v, o [N, HV, V], a, b [N, HV], indices int32 [N].

    The state is read from read_indices[n] and written to write_indices[n] (None: the same slot; padding: not
    written). Where the read index is padding, the output is zero and nothing is written. All reads precede all
    writes; of several writes to one slot the last wins.
    """
    N = len(read_indices)
    after = ssm_states.new_empty(N, 1, *ssm_states.shape[1:])
    verify_gated_fwd(
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        ssm_states,
        read_indices,
        torch.arange(N + 1, dtype=torch.int32),
        o,
        after,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        dtype=dtype,
        recurrence=recurrence,
        gates=gates,
    )
    steps = torch.where((read_indices < 0) | (read_indices >= len(ssm_states)), -1, 0)
    commit(ssm_states, read_indices if write_indices is None else write_indices, after, torch.arange(N), steps)


def commit_tokens(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    read_indices: Tensor,
    target_indices: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = recurrent,
    gates: Gates = raw_gates,
) -> None:
    """ssm_states[target_indices[n]] = the state of read_indices[n] after the first lengths[n] tokens of request n.

    A length beyond the request's tokens is all of them, one below 0 none: then the state is copied as it is. Where
    either index is padding nothing is written. All reads precede all writes; of several writes to one slot the last
    wins. Rejected tokens are not looked at.
    """
    starts = cu_seqlens.tolist()
    committed: list[tuple[int, Tensor]] = []
    requests = zip(read_indices.tolist(), target_indices.tolist(), lengths.tolist(), strict=True)
    for n, (slot, target, length) in enumerate(requests):
        if not 0 <= slot < len(ssm_states) or not 0 <= target < len(ssm_states):
            continue
        length = max(0, min(length, starts[n + 1] - starts[n]))
        if length == 0:
            committed.append((target, ssm_states[slot].clone()))
            continue
        tokens = slice(starts[n], starts[n] + length)
        g, beta = gates(A_log.to(dtype), a[tokens].to(dtype), dt_bias.to(dtype), b[tokens].to(dtype), allow_neg_eigval)
        keys = k[tokens].to(dtype)
        _, states = recurrence(
            keys,  # in place of q: outputs are not wanted
            keys,
            v[tokens].to(dtype),
            g,
            beta,
            ssm_states[slot].to(dtype),
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )
        committed.append((target, states[-1].to(ssm_states.dtype)))
    for target, state in committed:
        ssm_states[target] = state


def commit(dst_pool: Tensor, dst_indices: Tensor, intermediate_states: Tensor, rows: Tensor, steps: Tensor) -> None:
    """dst_pool[dst_indices[n]] = intermediate_states[rows[n], steps[n]]; a negative step is skipped, and so is padding.

    Args:
        dst_indices, rows, steps: integers [N]; steps[n] is the number of accepted tokens minus one.
    """
    for slot, row, step in zip(dst_indices.tolist(), rows.tolist(), steps.tolist(), strict=True):
        if step >= 0 and 0 <= slot < len(dst_pool) and 0 <= row < len(intermediate_states):
            dst_pool[slot] = intermediate_states[row, step].to(dst_pool.dtype)
