"""vLLM's paged state update on the public functions of `kernels`: its arguments, its pool, nothing copied.

vLLM has a column of slots for every draft token: a request reads its state at column num_accepted - 1 and leaves the
state after token t in the slot of column t, so that nothing is committed afterwards. Slots up to 0 are skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode.api import packed_recurrent_gated_delta_rule_decode
from kernels.verify.api import recurrent_gated_delta_rule_verify
from kernels.verify.paged_api import paged_recurrent_gated_delta_rule_verify

SOFTPLUS = (1.0, 20.0)  # beta and threshold, the only ones there are


def skipped_below_zero(indices: Tensor) -> Tensor:
    """vLLM's "up to 0 is skipped" as "negative is skipped", in int32."""
    return torch.where(indices > 0, indices, -1).to(torch.int32)


def paged_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode or verify with the arguments of vLLM's `fused_sigmoid_gating_delta_rule_update`.

    Args:
        A_log: [HV] fp32. dt_bias: [HV] fp32, bf16 or fp16. a, b: [NT, HV].
        q, k: [1, NT, H, K]; v: [1, NT, HV, V]. bf16.
        initial_state: [slots, HV, V, K], the pool, bf16, fp16 or fp32; slot pitch free. Updated in place.
        cu_seqlens: int32 [N + 1]. Requests without tokens are allowed.
        ssm_state_indices: int32, with at least N rows. [N, T], T up to 16, with num_accepted_tokens: the slots of the
            T columns, distinct in the batch; a request has at most T tokens. [N] or [N, 1] without: the slot that is
            read and written, with at most one token a request. Up to 0: a request whose first slot that is changes
            nothing and has zeros as output; another column that is loses its state.
        num_accepted_tokens: int32, at least N; 0 reads column 0, as 1 does.
        beta, threshold, inplace_final_state, is_kda: only their defaults.
    Returns:
        o like v, written whole, and the pool.
    Raises:
        TypeError, ValueError, NotImplementedError: this cannot be served. Nothing was launched or written.
    """
    if is_kda or not inplace_final_state or (beta, threshold) != SOFTPLUS:
        raise NotImplementedError(
            "only the gated delta rule in place, with softplus beta 1 and threshold 20, is served"
        )
    if initial_state is None or cu_seqlens is None or ssm_state_indices is None:
        raise NotImplementedError("only packed requests with a paged pool are served")
    N = cu_seqlens.shape[0] - 1
    indices = ssm_state_indices[:N]
    if num_accepted_tokens is None:
        if indices.dim() == 2:
            if indices.shape[1] != 1:
                raise NotImplementedError("several columns need num_accepted_tokens")
            indices = indices[:, 0]
        slots = skipped_below_zero(indices)
        # the pool stands in for snapshots that nobody asks for
        o = recurrent_gated_delta_rule_verify(
            A_log, a, dt_bias, q, k, v, b, initial_state, slots, cu_seqlens, initial_state.unsqueeze(1),
            torch.full_like(slots, -1), cache_steps=1, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            disable_state_update=False,
        )  # fmt: skip
        return o, initial_state
    if indices.dim() != 2:
        raise NotImplementedError("num_accepted_tokens need a column of slots for every token")
    o = paged_recurrent_gated_delta_rule_verify(
        A_log, a, dt_bias, q, k, v, b, initial_state, indices, num_accepted_tokens[:N], cu_seqlens, lowest_slot=1,
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, initial_state


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token each with the arguments of vLLM's `fused_recurrent_gated_delta_rule_packed_decode`.

    mixed_qkv: bf16 [N, 2 H K + HV V]. out: [N, 1, HV, V]. ssm_state_indices: [N], up to 0 is skipped, with zeros as
    output. The rest, the results and what is raised: as `paged_update`.
    """
    if ssm_state_indices.dim() != 1:
        raise NotImplementedError("packed decode has one slot for each request")
    packed_recurrent_gated_delta_rule_decode(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, skipped_below_zero(ssm_state_indices), out.squeeze(1), scale,
        use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, initial_state
