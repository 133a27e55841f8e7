"""The public verify functions: check once, allocate, dispatch.

CUDA tensors run the TileLang program that `plan` picks, on torch's current stream, with no host synchronisation and,
in the two low-level functions, no allocation: they can be captured in a CUDA graph, and a replay sees changed indices,
inputs and states. CPU tensors compute `reference.pool` through the same checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import reference.gating
import reference.lossless
import reference.pool
import reference.recurrence
from kernels import checks, runtime
from kernels.prepass.api import fused_recurrent_gdr_verify_prepass, wanted
from kernels.verify import contract
from kernels.verify.plan import plan
from reference.recurrence import softmax_scale


def gdn_sigmoid_gate(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), times two if `allow_neg_eigval`.

    Args:
        A_log, dt_bias: [HV]. a, b: [..., HV].
    Returns:
        g (log decay, <= 0) and beta, both [..., HV] in fp32 (fp64 if an input is fp64).
    """
    return reference.gating.gates(A_log, a, dt_bias, b, allow_neg_eigval)


def recurrent_gated_delta_rule_verify(
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
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int | None = None,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    disable_state_update: bool = True,
    allow_neg_eigval: bool = False,
    fuse_gating: bool = True,
    prepass: bool | None = None,
    retrieve_parent_token: Tensor | None = None,
    lossless: bool = False,
    head_batch: int = 1,
) -> Tensor:
    """Run the draft tokens of every request from its state, keeping the state after each of them (target verify).

    The recurrence, per request and value head (reference/recurrence.py):
        S = exp(g_t) S;  u_t = beta_t (v_t - S k_t);  S = S + u_t k_t^T;  o_t = S q_t

    Args:
        A_log: [HV] fp32. dt_bias: [HV] fp32, bf16 or fp16. a, b: [NT, HV] or [1, NT, HV], any strides.
        q, k: [1, NT, H, K] or [NT, H, K]; v: the same with HV, V. bf16. Token pitch free, [heads, dim] contiguous.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free. Not written unless committing.
        cache_indices: int32 [N], the slot of each request; a negative one (or one beyond the pool) marks padding:
            nothing is stored and the output rows are zero, whatever the inputs hold. Requests may share a slot; when
            committing, only one whose content does not matter, such as the padding slot 0.
        query_start_loc: int32 [N + 1], non-decreasing from 0: request n has tokens query_start_loc[n] to
            query_start_loc[n + 1] - 1 of the NT packed ones; none at all is allowed. NT <= N * D.
        intermediate_states_buffer: [rows, D, HV, V, K] in the pool's dtype, row and step pitch free. Step t of row
            intermediate_state_indices[n] receives the state after token t; everything else is untouched.
        intermediate_state_indices: int32, at least N long; a negative one stores nothing.
        cache_steps: bound on the tokens of one request, at most D. Default: D. Up to 16 the faster program runs.
        o: output like v, written whole (rows of no request become zero). Allocated if None.
        scale: of q, after its norm; None means K ** -0.5, and 0.0 means 0.0.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        disable_state_update: True leaves the pool unchanged; False also commits the last state to the slot.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        fuse_gating: gates from a, b inside the kernel; False computes them with `gdn_sigmoid_gate` first.
        prepass: compute gates and norms once per token in a launch of their own (`kernels.prepass`), not in every CTA;
            the results have the same bits (for cache_steps up to 2, those of head_batch=2). None: as the environment
            variable HOPPER_GDN_PREPASS says ("0" or "1", read in every call), without it as
            `kernels.prepass.should_use_prepass` says; a call with `lossless` or without `fuse_gating` has none. Its
            scratch, 8 bytes for each of NT * (H + HV), comes from torch's caching allocator on the current stream: safe
            to reuse in stream order, and part of the graph under capture.
        retrieve_parent_token: must be None: only linear chains of draft tokens are supported.
        lossless: round the state to the pool's dtype after every token, as that many decode calls would: o, snapshots
            and the committed state then equal, bit for bit, those of calls with one token each. False rounds only
            what is stored and differs from that by a few roundings (specs/design/lossless.md). CPU tensors compute
            the reference with the same rounding points, in fp32 (fp64 if q or the pool is fp64): bits are promised
            only for the programs.
        head_batch: 1, 2 or 4 value heads of one key head in a CTA, which divide HV / H; 2 is 1 % faster from some 64
            requests on, and 2 % slower at one. The same bits, but for cache_steps up to 2: 1 then has a program of
            its own, with the bits of decode for one token.
    Returns:
        o, shaped like v.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
        NotImplementedError: a token tree was asked for.
    """
    if retrieve_parent_token is not None:
        raise NotImplementedError("retrieve_parent_token must be None: only linear chains are supported (topk = 1)")
    if prepass and lossless:
        raise ValueError("prepass=True with lossless=True, whose norms have bits of their own; pass prepass=None")
    if prepass and not fuse_gating:
        raise ValueError("prepass=True with fuse_gating=False asks for the gates twice; pass fuse_gating=True")
    if o is None:
        contract.packed("v", v, 3)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    result = o
    q, k, v, o = (contract.packed(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v), ("o", o)))
    a, b = contract.packed("a", a, 2), contract.packed("b", b, 2)
    options: dict[str, Any] = {
        "cache_steps": cache_steps,
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "disable_state_update": disable_state_update,
        "lossless": lossless,
        "head_batch": head_batch,
    }
    paging = (ssm_states, cache_indices, query_start_loc, o)
    snapshots = (intermediate_states_buffer, intermediate_state_indices)
    if fuse_gating:
        N = cache_indices.numel() if isinstance(cache_indices, Tensor) else 0
        behind = not lossless and wanted(prepass, N, q.shape[0], q.shape[1], v.shape[1])
        verify = _behind_prepass if behind else fused_recurrent_gdr_verify_gated_fwd
        verify(q, k, v, a, b, A_log, dt_bias, *paging, *snapshots, allow_neg_eigval=allow_neg_eigval, **options)
    else:
        checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
        g, beta = gdn_sigmoid_gate(A_log, a, dt_bias, b, allow_neg_eigval)
        fused_recurrent_gdr_verify_fwd(q, k, v, g, beta, *paging, *snapshots, **options)
    return result


def fused_recurrent_gdr_verify_gated_fwd(
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
    intermediate_states: Tensor,
    intermediate_indices: Tensor,
    *,
    cache_steps: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    disable_state_update: bool = True,
    allow_neg_eigval: bool = False,
    lossless: bool = False,
    head_batch: int = 1,
) -> None:
    """Verify from raw gates into the caller's buffers; see `recurrent_gated_delta_rule_verify`.

    q, k: [NT, H, K]; v, o: [NT, HV, V]; a, b: [NT, HV]; the rest as there. Allocates nothing, returns nothing.
    """
    tensors = contract.check(
        q, k, v, ssm_states, state_indices, cu_seqlens, o, intermediate_states, intermediate_indices, cache_steps
    )
    contract.check_head_batch(head_batch, q, v, lossless)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    if _nothing_to_do(q, ssm_states, state_indices, o):
        return
    if checks.computes_reference(q):
        reference.pool.verify_gated_fwd(
            q, k, v, *gates, *tensors[3:], allow_neg_eigval=allow_neg_eigval,
            **_reference_options(q, ssm_states, scale, use_qk_l2norm_in_kernel, disable_state_update, lossless),
        )  # fmt: skip
        return
    q, k, v, *paging = contract.launchable(*tensors)
    program = _plan(q, v, ssm_states, a, dt_bias, intermediate_states, cache_steps, use_qk_l2norm_in_kernel,
                    disable_state_update, lossless, head_batch)  # fmt: skip
    runtime.launch(
        program, q, k, v, *gates, *paging, softmax_scale(scale, q.shape[2]), 2.0 if allow_neg_eigval else 1.0
    )


def fused_recurrent_gdr_verify_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    intermediate_states: Tensor,
    intermediate_indices: Tensor,
    *,
    cache_steps: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    disable_state_update: bool = True,
    lossless: bool = False,
    head_batch: int = 1,
    q_inv_norm: Tensor | None = None,
    k_inv_norm: Tensor | None = None,
) -> None:
    """Verify from g (log decay, <= 0) and beta, both fp32 [NT, HV] (`gdn_sigmoid_gate`), into the caller's buffers.

    With q_inv_norm and k_inv_norm (both or neither; fp32 [NT, H], contiguous) q and k are multiplied by them where the
    kernel would divide by the norms itself. They say all about the norms: use_qk_l2norm_in_kernel decides nothing then,
    and False is refused. Otherwise as `fused_recurrent_gdr_verify_gated_fwd`.
    """
    tensors = contract.check(
        q, k, v, ssm_states, state_indices, cu_seqlens, o, intermediate_states, intermediate_indices, cache_steps
    )
    contract.check_head_batch(head_batch, q, v, lossless)
    contract.check_activated_gates(g, beta, v)
    norms = contract.check_norms(q_inv_norm, k_inv_norm, q, use_qk_l2norm_in_kernel, lossless)
    if _nothing_to_do(q, ssm_states, state_indices, o):
        return
    if checks.computes_reference(q):
        l2norm = use_qk_l2norm_in_kernel and not norms
        options = _reference_options(q, ssm_states, scale, l2norm, disable_state_update, lossless)
        if norms:
            q, k = (x.to(options["dtype"]) * norm[..., None] for x, norm in zip((q, k), norms, strict=True))
        reference.pool.verify_fwd(q, k, v, g, beta, *tensors[3:], **options)
        return
    q, k, v, *paging = contract.launchable(*tensors)
    program = _plan(q, v, ssm_states, g, None, intermediate_states, cache_steps, use_qk_l2norm_in_kernel,
                    disable_state_update, lossless, head_batch, norms_given=bool(norms))  # fmt: skip
    runtime.launch(program, q, k, v, g, beta, *norms, *paging, softmax_scale(scale, q.shape[2]))


def _behind_prepass(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *buffers: Any,
    allow_neg_eigval: bool, **options: Any,
) -> None:  # fmt: skip
    """`fused_recurrent_gdr_verify_gated_fwd` as two launches with scratch between them."""
    tensors = contract.check(*(q, k, v, *buffers, options["cache_steps"]))
    contract.check_head_batch(options["head_batch"], q, v, options["lossless"])
    checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    if not checks.computes_reference(q):
        contract.launchable(*tensors)  # before the first launch, also what only the second one needs
    dtype = reference.gating.working_dtype(q, buffers[0])
    g, beta = torch.empty(2, *v.shape[:2], dtype=dtype, device=q.device)
    q_inv_norm, k_inv_norm = torch.empty(2, *q.shape[:2], dtype=dtype, device=q.device)
    fused_recurrent_gdr_verify_prepass(
        q, k, a, b, A_log, dt_bias, g, beta, q_inv_norm, k_inv_norm, allow_neg_eigval=allow_neg_eigval
    )
    if options["use_qk_l2norm_in_kernel"]:
        options |= {"q_inv_norm": q_inv_norm, "k_inv_norm": k_inv_norm}
    fused_recurrent_gdr_verify_fwd(q, k, v, g, beta, *buffers, **options)


def _nothing_to_do(q: Tensor, ssm_states: Tensor, state_indices: Tensor, o: Tensor) -> bool:
    """No tokens, no requests, or no slot that one could name: the output is zero."""
    if q.shape[0] and state_indices.shape[0] and ssm_states.shape[0]:
        return False
    o.zero_()
    return True


def _reference_options(
    q: Tensor, ssm_states: Tensor, scale: float | None, l2norm: bool, disable_state_update: bool, lossless: bool
) -> dict[str, Any]:
    return {
        "scale": scale,
        "use_qk_l2norm_in_kernel": l2norm,
        "commit": not disable_state_update,
        "dtype": reference.gating.working_dtype(q, ssm_states),
        "recurrence": reference.lossless.stored_as(ssm_states.dtype) if lossless else reference.recurrence.recurrent,
    }


def _plan(
    q: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    gate: Tensor,
    dt_bias: Tensor | None,
    intermediate_states: Tensor,
    cache_steps: int | None,
    l2norm: bool,
    disable_state_update: bool,
    lossless: bool,
    head_batch: int,
    norms_given: bool = False,
) -> runtime.Program:
    return plan(
        H=q.shape[1],
        HV=v.shape[1],
        K=q.shape[2],
        V=v.shape[2],
        pool=checks.dtype_name(ssm_states),
        raw_gates=dt_bias is not None,
        gate_dtype=checks.dtype_name(gate),
        bias_dtype=checks.dtype_name(dt_bias) if dt_bias is not None else "float32",
        l2norm=l2norm,
        commit=not disable_state_update,
        max_tokens=intermediate_states.shape[1] if cache_steps is None else cache_steps,
        lossless=lossless,
        norms_given=norms_given,
        head_batch=head_batch,
    )
