"""Verify whose states stay in the pool, a slot for each draft token: vLLM's scheme, with nothing to commit."""

from __future__ import annotations

import torch
from torch import Tensor

import reference.gating
import reference.pool
from kernels import checks, runtime
from kernels.tile import TM
from kernels.verify import contract
from kernels.verify.plan import paged_plan
from reference.recurrence import softmax_scale


def paged_recurrent_gated_delta_rule_verify(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    slot_table: Tensor,
    accepted_lengths: Tensor,
    query_start_loc: Tensor,
    *,
    lowest_slot: int = 0,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Run the draft tokens of every request from its state, leaving the state after token t in slot t of the request.

    The recurrence, per request and value head (reference/recurrence.py):
        S = exp(g_t) S;  u_t = beta_t (v_t - S k_t);  S = S + u_t k_t^T;  o_t = S q_t

    Args:
        A_log, a, dt_bias, q, k, v, b, query_start_loc: as in `recurrent_gated_delta_rule_verify`.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free. Read and written in place.
        slot_table: int32 [N, D], D from 1 to 16, row pitch free: the slot of each token of a request. A request has at
            most D tokens. Slots that are written must be distinct, and no other request may read them.
        accepted_lengths: int32 [N], tokens that the last call's verify had accepted: the first state of request n is in
            slot_table[n, accepted_lengths[n] - 1], which is also written if there are so many tokens. Below 1 counts
            as 1, above D as D.
        lowest_slot: slots below it (or beyond the pool) are skipped; 1 where slot 0 is a null block. A request whose
            first state is in one is padding: nothing is stored and the output rows are zero, whatever the inputs hold.
        o: output like v, written whole (rows of no request become zero). Allocated if None.
        scale, use_qk_l2norm_in_kernel, allow_neg_eigval: as in `recurrent_gated_delta_rule_verify`.
    Returns:
        o, shaped like v.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    if o is None:
        contract.packed("v", v, 3)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    result = o
    q, k, v, o = (contract.packed(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v), ("o", o)))
    a, b = contract.packed("a", a, 2), contract.packed("b", b, 2)
    tensors = contract.check_inputs(q, k, v, ssm_states, accepted_lengths, query_start_loc, o)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    slots = _check_table(slot_table, tensors[4], tensors[5], q.shape[0], lowest_slot)
    if not all(x.numel() for x in (v, ssm_states, accepted_lengths)):  # no tokens, no requests or no slot of any
        o.zero_()
        return result
    if checks.computes_reference(q):
        reference.pool.verify_paged_fwd(
            q, k, v, gates[0], gates[1], gates[2], gates[3], ssm_states, slots, tensors[4], tensors[5], tensors[6],
            lowest_slot=lowest_slot, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            dtype=reference.gating.working_dtype(q, ssm_states),
        )  # fmt: skip
        return result
    q, k, v, pool, accepted, starts, o = contract.launchable_inputs(*tensors)
    program = paged_plan(
        H=q.shape[1],
        HV=v.shape[1],
        K=q.shape[2],
        V=v.shape[2],
        pool=checks.dtype_name(ssm_states),
        gate_dtype=checks.dtype_name(a),
        bias_dtype=checks.dtype_name(dt_bias),
        l2norm=use_qk_l2norm_in_kernel,
    )
    runtime.launch(
        program, q, k, v, *gates, pool, slots, accepted, starts, o, softmax_scale(scale, q.shape[2]),
        2.0 if allow_neg_eigval else 1.0, lowest_slot,
    )  # fmt: skip
    return result


def _check_table(slot_table: Tensor, accepted: Tensor, cu_seqlens: Tensor, NT: int, lowest: int) -> Tensor:
    """The table with canonical strides."""
    N = accepted.shape[0]
    checks.tensor("slot_table", slot_table, (N, None), contract.INDEX, accepted.device)
    D = slot_table.shape[1]
    if not 1 <= D <= TM:
        raise ValueError(
            f"slot_table has {D} columns, must have 1 to {TM}; for longer requests call "
            "recurrent_gated_delta_rule_verify, which keeps states in a buffer"
        )
    if not 0 <= lowest < 2**31:
        raise ValueError(f"lowest_slot is {lowest}, must be 0 or more; pass 1 where slot 0 is a null block")
    if cu_seqlens.device.type == "cpu" and (tokens := contract.longest(cu_seqlens, NT)) > D:
        raise ValueError(f"a request has {tokens} tokens, slot_table has {D} columns; give it more columns")
    return checks.inner_contiguous("slot_table", slot_table, 1)
