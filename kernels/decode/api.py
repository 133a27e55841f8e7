"""The public functions of paged decode: check once, allocate, dispatch.

CUDA tensors run the TileLang program that `plan` picks, on torch's current stream, with no host synchronisation and,
where the caller passes `o`, no allocation: they can be captured in a CUDA graph, and a replay sees changed indices,
inputs and states. CPU tensors compute `reference.pool.decode` through the same checks.

An eager call costs the host little: the compiled function checks dtypes, shapes, strides and devices itself, so once a
call has passed the full checks, whose errors name value, limit and remedy, the next one of its kind goes straight to
the launch (`_launch_known`), and back to the full checks if that refuses it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import reference.gating
import reference.pool
from kernels import checks, runtime
from kernels.decode import contract
from kernels.decode.plan import plan
from kernels.runtime import Program
from kernels.verify.contract import packed
from reference.recurrence import softmax_scale

#: static facts of a call -> its program, once a call with these facts has passed all checks; one entry for each number
#: of requests and pool that is seen
_programs: dict[tuple[Any, ...], Program] = {}


def recurrent_gated_delta_rule_decode(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    write_indices: Tensor | None = None,
) -> Tensor:
    """One token of every request, its state in a paged pool updated in place or moved to another slot.

    The recurrence, per request and value head (reference/recurrence.py), with g = -exp(A_log) softplus(a + dt_bias)
    and beta = sigmoid(b), both in fp32:
        S = exp(g) S;  u = beta (v - S k);  S = S + u k^T;  o = S q

    Args:
        A_log: [HV] fp32. dt_bias: [HV] fp32, bf16 or fp16. a, b: [N, HV], any strides.
        q, k: [N, H, K]; v: [N, HV, V]. bf16. Request pitch free, [heads, dim] contiguous. All of q, k, v, a, b and o
            may have a leading 1, as the tokens of one packed sequence.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free. Rounded to nearest when stored.
        cache_indices: int32 [N], the slot that each request's state is read from; a negative one (or one beyond the
            pool) marks padding: nothing is stored and the output is zero, whatever the inputs hold. Requests that
            share a slot may read each other's writes: share only one whose content does not matter (padding slot 0).
        o: output like v, written whole. Allocated if None.
        scale: of q, after its norm; None means K ** -0.5, and 0.0 means 0.0.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        write_indices: int32 [N], the slot that the new state goes to; a negative one (or one beyond the pool) stores
            nothing. None: the slot that it was read from. No request may write a slot that another one reads.
    Returns:
        o, shaped like v. T such calls have the bits of one `kernels.verify` call of T tokens with lossless=True.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    if o is None:
        packed("v", v, 3)
        o = v.new_empty(v.shape)
    result = o
    if not isinstance(q, Tensor) or q.dim() != 3:
        q, k, v, o = (packed(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v), ("o", o)))
        a, b = packed("a", a, 2), packed("b", b, 2)
    fused_recurrent_gdr_decode_fwd(
        q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, o, write_indices,
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return result


def packed_recurrent_gated_delta_rule_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    write_indices: Tensor | None = None,
) -> Tensor:
    """`recurrent_gated_delta_rule_decode` on the row that the convolution leaves: no split of q, k and v before it.

    Args:
        mixed_qkv: bf16 [N, 2 H K + HV V], q, k and v of a request behind each other; row pitch free. H follows from
            the number of columns and the [HV, V, K] of ssm_states.
        a, b: [N, HV]. The rest as there.
    Returns:
        [1, N, HV, V], or o, [N, HV, V] or [1, N, HV, V], if it was given.
    """
    if o is None:
        contract.key_heads(mixed_qkv, ssm_states)
        o = mixed_qkv.new_empty((1, mixed_qkv.shape[0], *ssm_states.shape[1:3]))
    out = o[0] if isinstance(o, Tensor) and o.dim() == 4 and o.shape[0] == 1 else o
    _decode(
        (mixed_qkv,), a, b, A_log, dt_bias, ssm_states, cache_indices, out, write_indices,
        scale, use_qk_l2norm_in_kernel, allow_neg_eigval,
    )  # fmt: skip
    return o


def fused_recurrent_gdr_decode_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    o: Tensor,
    write_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> None:
    """Decode into the caller's buffers; see `recurrent_gated_delta_rule_decode`.

    q, k: [N, H, K]; v, o: [N, HV, V]; a, b: [N, HV]; the rest as there. Allocates nothing, returns nothing.
    """
    _decode(
        (q, k, v), a, b, A_log, dt_bias, ssm_states, state_indices, o, write_indices,
        scale, use_qk_l2norm_in_kernel, allow_neg_eigval,
    )  # fmt: skip


def _decode(
    inputs: tuple[Tensor, ...], a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    state_indices: Tensor, o: Tensor, write_indices: Tensor | None, scale: float | None, l2norm: bool, neg_eigval: bool,
) -> None:  # fmt: skip
    """inputs: q, k, v, or mixed_qkv alone."""
    indices = (state_indices,) if write_indices is None else (state_indices, write_indices)
    raw_gates = (a, b, A_log, dt_bias)
    if _launch_known(inputs, raw_gates, ssm_states, indices, o, scale, l2norm, neg_eigval):
        return
    q, k, v = inputs if len(inputs) == 3 else contract.split(inputs[0], ssm_states)
    contract.check_vectors(q, k, v)
    contract.check_paging(v, q.shape[2], ssm_states, state_indices, o, write_indices)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    if not q.shape[0] or not ssm_states.shape[0]:
        o.zero_()  # no requests, or no slot that one could name
        return
    if checks.computes_reference(q):
        reference.pool.decode(
            q, k, v, a, b, A_log, dt_bias, ssm_states, state_indices, o, write_indices, scale=scale,
            use_qk_l2norm_in_kernel=l2norm, allow_neg_eigval=neg_eigval,
            dtype=reference.gating.working_dtype(q, ssm_states),
        )  # fmt: skip
        return
    wide = contract.launchable(inputs, ssm_states, indices, o, q.shape[2])
    vectors, paging = wide[: len(inputs)], wide[len(inputs) :]
    program = plan(
        H=q.shape[1],
        HV=v.shape[1],
        K=q.shape[2],
        V=v.shape[2],
        pool=checks.dtype_name(ssm_states),
        gate_dtype=checks.dtype_name(a),
        bias_dtype=checks.dtype_name(dt_bias),
        l2norm=l2norm,
        packed=len(inputs) == 1,
        moves=write_indices is not None,
    )
    runtime.launch(program, *vectors, *gates, *paging, softmax_scale(scale, q.shape[2]), 2.0 if neg_eigval else 1.0)
    _programs[_facts(inputs, raw_gates, ssm_states, indices, l2norm)] = program


def _facts(
    inputs: tuple[Tensor, ...], gates: tuple[Tensor, ...], ssm_states: Tensor, indices: tuple[Tensor, ...], l2norm: bool
) -> tuple[Any, ...]:
    """All that `plan` needs to know, sizes that must not be zero, the device, and what launches on it."""
    return (
        ssm_states.shape, ssm_states.dtype, inputs[0].shape, gates[0].dtype, gates[3].dtype,
        len(inputs), len(indices), l2norm, ssm_states.device, runtime.cpu_launcher,
    )  # fmt: skip


def _launch_known(
    inputs: tuple[Tensor, ...], gates: tuple[Tensor, ...], ssm_states: Tensor, indices: tuple[Tensor, ...], o: Tensor,
    scale: float | None, l2norm: bool, neg_eigval: bool,
) -> bool:  # fmt: skip
    """Launch a call whose like has passed all checks. False: nothing was launched.

    Of the full checks, only that accesses are of 16 bytes is not made by the compiled function as well.
    """
    try:
        program = _programs.get(_facts(inputs, gates, ssm_states, indices, l2norm))
        if program is None:
            return False
        addresses = pitches = 0
        for x in (*inputs, ssm_states, o):
            addresses |= x.data_ptr()
            pitches |= x.stride()[0]
        if addresses & 15 or pitches & 7 or pitches >> 31:
            return False
        factor = softmax_scale(scale, ssm_states.shape[3])
        runtime.launch(program, *inputs, *gates, ssm_states, *indices, o, factor, 2.0 if neg_eigval else 1.0)
    except Exception:
        return False  # the full checks say what is wrong, or meet the same error again
    return True
