"""The gated delta rule, one token at a time: the definition every other form has to equal.

    S   = exp(g) S                      S [V, K], V-major
    u   = beta (v - S k)
    S   = S + u k^T
    o   = S q                           read after the update

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, eq. 10, with the state transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from reference.gating import l2norm, working_dtype

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Recurrence(Protocol):
    """The signature that `recurrent`, `chunk.chunked` and the mutants share."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        S0: Tensor | None = None,
        *,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


def delta_step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token. S [..., V, K]; q, k [..., K] as used (normalised, scaled); v [..., V]; g, beta [...].

    Returns the new state and o [..., V].
    """
    S = torch.exp(g)[..., None, None] * S
    u = beta[..., None] * (v - torch.einsum("...vk,...k->...v", S, k))
    S = S + u[..., :, None] * k[..., None, :]
    return S, torch.einsum("...vk,...k->...v", S, q)


def softmax_scale(scale: float | None, K: int) -> float:
    """K**-0.5 for None; any number, 0.0 included, is itself."""
    return K**-0.5 if scale is None else float(scale)


def per_value_head(x: Tensor, HV: int) -> Tensor:
    """[T, H, K] -> [T, HV, K]: value head h reads key head h // (HV // H).

    Raises ValueError if HV is not a multiple of H.
    """
    H = x.shape[-2]
    if HV % H:
        raise ValueError(f"HV must be a multiple of H, got HV={HV}, H={H}")
    return x.repeat_interleave(HV // H, dim=-2)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    step: Step = delta_step,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over one sequence.

    Args:
        q, k: [T, H, K]. v: [T, HV, V]. g (log decay), beta: [T, HV]. Any T >= 0.
        S0: [HV, V, K], the state before the first token; None is zero.
        scale: factor on q, after its norm; None is K**-0.5.
        use_qk_l2norm: divide q and k by sqrt(sum x^2 + 1e-6).

    Returns:
        o [T, HV, V] and the state after every token [T, HV, V, K], in the widest dtype of the arguments, at
        least fp32.
    """
    dtype = working_dtype(q, k, v, g, beta, *(() if S0 is None else (S0,)))
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    (T, HV, V), K = v.shape, k.shape[-1]
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = per_value_head(q * softmax_scale(scale, K), HV), per_value_head(k, HV)

    S = v.new_zeros(HV, V, K) if S0 is None else S0.to(dtype)
    o, states = v.new_empty(T, HV, V), v.new_empty(T, HV, V, K)
    for t in range(T):
        S, o[t] = step(S, q[t], k[t], v[t], g[t], beta[t])
        states[t] = S
    return o, states
