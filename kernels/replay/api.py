"""The public functions of replay: check once, allocate the output if there is none, launch.

CUDA tensors run one TileLang program on torch's current stream, without synchronisation and, with `o` given, without
allocation: the call can be captured in a CUDA graph, and a replay sees changed indices, inputs and states. CPU tensors
compute `reference.pool` through the same checks.
"""

from __future__ import annotations

from torch import Tensor

import reference.gating
import reference.pool
from kernels import checks, runtime
from kernels.replay import contract
from kernels.replay.plan import fold_plan, plan
from kernels.verify.contract import check_inputs, launchable_inputs, packed
from reference.recurrence import softmax_scale


def verify(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    *,
    max_tokens: int = 16,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Run the draft tokens of every request from its state and return their outputs; no state is stored anywhere.

    The recurrence, per request and value head (reference/recurrence.py):
        S = exp(g_t) S;  u_t = beta_t (v_t - S k_t);  S = S + u_t k_t^T;  o_t = S q_t

    Finite inputs are assumed within a request: a NaN or an infinity spoils all outputs of its request, and of no other.
    A state after accepted tokens follows from the pool and from k, v, a and b, which are the smallest exact record of
    it: a caller who will `commit` keeps the four tensors, and leaves the slot as it is until then.

    Args:
        A_log: [HV] fp32. dt_bias: [HV] fp32, bf16 or fp16. a, b: [NT, HV] or [1, NT, HV], any strides.
        q, k: [1, NT, H, K] or [NT, H, K]; v: the same with HV, V. bf16. Token pitch free, [heads, dim] contiguous.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free. Read only.
        cache_indices: int32 [N], the slot of each request; a negative one (or one beyond the pool) marks padding: its
            output rows are zero, whatever the inputs hold. Requests may share a slot.
        query_start_loc: int32 [N + 1], non-decreasing from 0: request n has tokens query_start_loc[n] to
            query_start_loc[n + 1] - 1 of the NT packed ones; none at all is allowed. On a device the values are not
            looked at: others than these give outputs without meaning, and write nothing outside `o`.
        max_tokens: bound on the tokens of one request, 1 to 16. NT <= N * max_tokens. It never compiles anything.
        o: output like v, written whole (rows of no request become zero). Allocated if None.
        scale: of q, after its norm; None means K ** -0.5, and 0.0 means 0.0.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
    Returns:
        o, shaped like v.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    result, (q, k, v, o), (a, b) = contract.packed_inputs(q, k, v, a, b, o)
    tensors = check_inputs(q, k, v, ssm_states, cache_indices, query_start_loc, o)
    contract.check_tokens(tensors[5], q.shape[0], max_tokens)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    if not all(x.numel() for x in (v, ssm_states, cache_indices)):  # no tokens, no requests or no slot of any
        o.zero_()
        return result
    if checks.computes_reference(q):
        reference.pool.verify_gated_fwd(
            q, k, v, *gates, *tensors[3:], scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval, dtype=reference.gating.working_dtype(q, ssm_states),
        )  # fmt: skip
        return result
    q, k, v, *paging = launchable_inputs(*tensors)
    program = plan(**contract.facts(k, v, ssm_states, a, dt_bias, use_qk_l2norm_in_kernel))
    runtime.launch(
        program, q, k, v, *gates, *paging, softmax_scale(scale, q.shape[2]), 2.0 if allow_neg_eigval else 1.0
    )
    return result


def commit(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    accepted_lengths: Tensor,
    *,
    target_indices: Tensor | None = None,
    max_tokens: int = 16,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> None:
    """Apply the accepted tokens of every request to its state: S_L of the recurrence that `verify` ran.

    The state of the pool is read once and written once. Rejected tokens are not looked at, whatever they hold. The
    stored state is the one that a verify with snapshots keeps after token L - 1, to the rounding of the pool.

    Args:
        A_log, a, dt_bias, k, v, b: what `verify` was given, unchanged since.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free. Read and written in place.
        cache_indices: int32 [N], the slots that were verified. A negative one (or one beyond the pool) marks padding:
            nothing is read or written for it.
        query_start_loc: int32 [N + 1], as in `verify`. On a device the values are not looked at: others than these
            give states without meaning, and write nothing outside of the target slots.
        accepted_lengths: int32 [N] on the same device, 0 to the tokens of the request; what lies outside is taken as
            the nearest of these. A request with 0 is left as it is.
        target_indices: int32 [N], where the states go; None: to where they came from. A negative one (or one beyond
            the pool) drops the state. With length 0 the state is copied. Slots that are written must not be written by
            two requests, nor read by another one.
        max_tokens: bound on the tokens of one request, 1 to 16. NT <= N * max_tokens. It never compiles anything.
        use_qk_l2norm_in_kernel, allow_neg_eigval: as in `verify`.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    k, v = packed("k", k, 3), packed("v", v, 3)
    a, b = packed("a", a, 2), packed("b", b, 2)
    k, v, pool, *requests = contract.check_commit(
        k, v, ssm_states, cache_indices, target_indices, query_start_loc, accepted_lengths
    )
    contract.check_tokens(requests[2], k.shape[0], max_tokens)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    if not all(x.numel() for x in (v, ssm_states, cache_indices)):  # no tokens, no requests or no slot of any
        return
    if checks.computes_reference(k):
        reference.pool.commit_tokens(
            k, v, gates[0], gates[1], gates[2], gates[3], pool, requests[0], requests[1], requests[2], requests[3],
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
            dtype=reference.gating.working_dtype(k, ssm_states),
        )  # fmt: skip
        return
    k, v, pool = contract.launchable_states(k, v, pool)
    program = fold_plan(**contract.facts(k, v, ssm_states, a, dt_bias, use_qk_l2norm_in_kernel))
    runtime.launch(program, k, v, *gates, pool, *requests, 2.0 if allow_neg_eigval else 1.0)
