"""The gated delta rule, a chunk of tokens at a time: exactly the recurrence, as matrix products.

With G_t = g_1 + ... + g_t inside the chunk and D[t, i] = exp(g_{i+1} + ... + g_t) for i <= t, else 0:

    u_t = beta_t (v_t - exp(G_t) S_0 k_t - sum_{i<t} D[t,i] (k_t . k_i) u_i)
    o_t = exp(G_t) S_0 q_t + sum_{i<=t} D[t,i] (q_t . k_i) u_i
    S_t = exp(g_t) S_{t-1} + u_t k_t^T
    S_C = exp(G_C) S_0 + sum_i D[C,i] u_i k_i^T

Products are taken of the raw q and k; the inverse norms (from the Gram matrix's own diagonal) and the scale
multiply the results. So a bf16 q, k or pool enters every product unrounded; the kernels rely on that.
specs/design/chunk-form.md derives both forms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reference.gating import working_dtype
from reference.recurrence import per_value_head, softmax_scale

EPS = 1e-6  # of the q and k norms


def segment_decay(g: Tensor) -> Tensor:
    """g [C, HV] -> D [HV, C, C], D[t, i] = exp(sum of g_{i+1} .. g_t) for i <= t and 0 above the diagonal.

    Each sum is accumulated by itself: the difference G_t - G_i of two running sums would cancel under strong
    decay, and be inf - inf for g = -inf.
    """
    C = g.shape[0]
    lower = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    terms = g.T[:, :, None].expand(-1, C, C).masked_fill(~lower.tril(-1), 0.0)
    return torch.exp(terms.cumsum(-2)).masked_fill(~lower, 0.0)


class _Chunk(NamedTuple):
    """What both forms need of one chunk: everything is [HV, ...], the T x T matrices lower triangular."""

    decay: Tensor  # exp(G) [HV, C]
    D: Tensor  # [HV, C, C]
    A: Tensor  # k_t . k_i, strictly lower
    B: Tensor  # q_t . k_i, with the diagonal
    k_factor: Tensor  # [HV, C]: what turns a product with the raw k into one with the k in use
    q_factor: Tensor


def _gram(q: Tensor, k: Tensor, g: Tensor, scale: float, use_qk_l2norm: bool) -> _Chunk:
    """q, k [C, H, K] raw, g [C, HV]. The Gram product is made once per key head."""
    HV = g.shape[1]
    A = torch.einsum("thk,ihk->thi", k, k)
    B = torch.einsum("thk,ihk->thi", q, k)
    kk, qq = A.diagonal(dim1=0, dim2=2).T, torch.einsum("thk,thk->th", q, q)
    k_factor = torch.rsqrt(kk + EPS) if use_qk_l2norm else torch.ones_like(kk)
    q_factor = torch.rsqrt(qq + EPS) * scale if use_qk_l2norm else torch.full_like(qq, scale)
    A = A * k_factor[:, :, None] * k_factor.T
    B = B * q_factor[:, :, None] * k_factor.T
    A, B = (per_value_head(x, HV).transpose(0, 1) for x in (A, B))
    k_factor, q_factor = (per_value_head(x[:, :, None], HV)[:, :, 0].T for x in (k_factor, q_factor))
    return _Chunk(torch.exp(g.cumsum(0)).T, segment_decay(g), A.tril(-1), B.tril(), k_factor, q_factor)


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor, scale: float, use_qk_l2norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [C, HV, V], states [C, HV, V, K], the state after the chunk in closed form [HV, V, K])."""
    HV = v.shape[1]
    c = _gram(q, k, g, scale, use_qk_l2norm)
    q, k = per_value_head(q, HV), per_value_head(k, HV)
    Y_k = torch.einsum("hvk,thk->htv", S0, k) * (c.decay * c.k_factor)[..., None]
    Y_q = torch.einsum("hvk,thk->htv", S0, q) * (c.decay * c.q_factor)[..., None]

    rate = beta.T[..., None]  # [HV, C, 1]
    L = rate * c.D * c.A
    u = torch.linalg.solve_triangular(L, rate * (v.transpose(0, 1) - Y_k), upper=False, unitriangular=True)
    o = Y_q + (c.D * c.B) @ u

    uk = u * c.k_factor[..., None]  # so that uk_t k_t^T is the rank-one update with the raw k
    states, S = [], S0
    for t in range(len(g)):
        S = torch.exp(g[t])[:, None, None] * S + uk[:, t, :, None] * k[t][:, None, :]
        states.append(S)
    closed = c.decay[:, -1, None, None] * S0 + torch.einsum("hi,hiv,ihk->hvk", c.D[:, -1], uk, k)
    return o.transpose(0, 1), torch.stack(states), closed


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """`recurrence.recurrent` in chunks of `chunk_size` tokens (the last may be shorter): same results.

    From chunk to chunk the closed form of the state is carried: an error in it shows in all that follows.
    """
    dtype = working_dtype(q, k, v, g, beta, *(() if S0 is None else (S0,)))
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    (T, HV, V), K = v.shape, k.shape[-1]
    S = v.new_zeros(HV, V, K) if S0 is None else S0.to(dtype)
    o, states = v.new_empty(T, HV, V), v.new_empty(T, HV, V, K)
    for start in range(0, T, chunk_size):
        part = slice(start, start + chunk_size)
        o[part], states[part], S = _one_chunk(
            q[part], k[part], v[part], g[part], beta[part], S, softmax_scale(scale, K), use_qk_l2norm
        )
    return o, states


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S0: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Tensor:
    """Only the outputs of one chunk, o [T, HV, V], without forming u: one product touches the state.

    W = (I + L)^-1 diag(beta),   L = strictly lower part of beta_t D[t,i] (k_t . k_i)
    M = (D o (Q K^T)) W
    o = (diag(e^G) Q - M diag(e^G) K) S_0^T + M V
    """
    dtype = working_dtype(q, k, v, g, beta, *(() if S0 is None else (S0,)))
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    HV = v.shape[1]
    c = _gram(q, k, g, softmax_scale(scale, k.shape[-1]), use_qk_l2norm)
    L = beta.T[..., None] * c.D * c.A
    W = torch.linalg.solve_triangular(L, torch.diag_embed(beta.T), upper=False, unitriangular=True)
    M = (c.D * c.B) @ W
    o = M @ v.transpose(0, 1)
    if S0 is not None:
        q, k = (per_value_head(x, HV).transpose(0, 1) for x in (q, k))
        P = (c.decay * c.q_factor)[..., None] * q - M @ ((c.decay * c.k_factor)[..., None] * k)
        o = o + P @ S0.to(dtype).mT
    return o.transpose(0, 1)
