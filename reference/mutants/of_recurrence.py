"""Mutants of one token (level step) and of one sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reference import gating, recurrence
from reference.mutants.registry import Run, mutant


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("...vk,...k->...v", S, x)


def _outer(u: Tensor, k: Tensor) -> Tensor:
    return u[..., :, None] * k[..., None, :]


def _decayed(S: Tensor, g: Tensor) -> Tensor:
    return torch.exp(g)[..., None, None] * S


@mutant("step")
def read_before_update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """o is read from the decayed state, before the rank-one update."""
    return recurrence.delta_step(S, q, k, v, g, beta)[0], _read(_decayed(S, g), q)


@mutant("step", needs="a state before the token")
def predict_before_decay(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """The prediction S k is made with the state before its decay."""
    S = _decayed(S, g) + _outer(beta[..., None] * (v - _read(S, k)), k)
    return S, _read(S, q)


@mutant("step")
def decay_after_update(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """The state decays after the update, so the new token decays too."""
    S = _decayed(S + _outer(beta[..., None] * (v - _read(S, k)), k), g)
    return S, _read(S, q)


@mutant("step", needs="a state before the token")
def no_decay(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """The decay is left out."""
    return recurrence.delta_step(S, q, k, v, torch.zeros_like(g), beta)


@mutant("step", needs="a state before the token")
def no_prediction(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """u = beta v: linear attention, not the delta rule."""
    S = _decayed(S, g) + _outer(beta[..., None] * v, k)
    return S, _read(S, q)


@mutant("step", needs="a state before the token")
def beta_on_value_only(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """u = beta v - S k: beta is not applied to the prediction."""
    S = _decayed(S, g)
    S = S + _outer(beta[..., None] * v - _read(S, k), k)
    return S, _read(S, q)


@mutant("step", needs="K == V, otherwise it is an error of shape")
def transposed_state(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """The state is taken and left K-major; with K == V no shape objects."""
    S, o = recurrence.delta_step(S.mT, q, k, v, g, beta)
    return S.mT, o


@mutant("step", needs="several tokens", subtle=True)
def state_rounded_every_token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    """The state goes through bf16 between the tokens of one call."""
    S, o = recurrence.delta_step(S, q, k, v, g, beta)
    return S.bfloat16().to(S.dtype), o


@mutant("sequence", needs="1 < H < HV")
def interleaved_heads(c: SimpleNamespace, run: Run) -> Any:
    """Value head h reads key head h % H."""
    groups = c.v.shape[1] // c.q.shape[1]
    c.q, c.k = c.q.repeat(1, groups, 1), c.k.repeat(1, groups, 1)
    return run()


@mutant("sequence", needs="several tokens")
def cumulative_decay(c: SimpleNamespace, run: Run) -> Any:
    """The running sum of g is used where the token's own g belongs."""
    c.g = c.g.cumsum(0)
    return run()


@mutant("sequence", needs="several tokens")
def tokens_reversed(c: SimpleNamespace, run: Run) -> Any:
    """The tokens are processed from the last to the first."""
    c.q, c.k, c.v, c.g, c.beta = (x.flip(0) for x in (c.q, c.k, c.v, c.g, c.beta))
    return tuple(x.flip(0) for x in run())


@mutant("sequence", needs="an initial state")
def initial_state_ignored(c: SimpleNamespace, run: Run) -> Any:
    """The state starts at zero."""
    c.S0 = None
    return run()


@mutant("sequence", needs="l2norm in use")
def raw_key(c: SimpleNamespace, run: Run) -> Any:
    """q is normalised, k is not."""
    if c.use_qk_l2norm:
        c.q, c.use_qk_l2norm = gating.l2norm(c.q), False
    return run()


@mutant("sequence", needs="l2norm in use and q or k about as small as sqrt(eps)")
def norm_clamped(c: SimpleNamespace, run: Run) -> Any:
    """x / max(norm, eps): the eps is not inside the root."""
    if c.use_qk_l2norm:
        c.q, c.k = (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6) for x in (c.q, c.k))
        c.use_qk_l2norm = False
    return run()


@mutant("sequence", needs="l2norm in use", subtle=True)
def norm_squared_in_bf16(c: SimpleNamespace, run: Run) -> Any:
    """The squares under the norm are rounded to bf16."""
    if c.use_qk_l2norm:
        squares = (x.bfloat16().square().to(x.dtype) for x in (c.q, c.k))
        inverse = [torch.rsqrt(square.sum(-1, keepdim=True) + 1e-6) for square in squares]
        c.q, c.k, c.use_qk_l2norm = c.q * inverse[0], c.k * inverse[1], False
    return run()


@mutant("sequence", needs="l2norm in use and a scale that is not 1")
def scale_before_norm(c: SimpleNamespace, run: Run) -> Any:
    """The scale is applied before the norm, which removes it."""
    c.q, c.scale = c.q * recurrence.softmax_scale(c.scale, c.q.shape[-1]), 1.0
    return run()


@mutant("sequence", needs="a scale that is not 1")
def scale_on_key(c: SimpleNamespace, run: Run) -> Any:
    """The scale is applied to k, and so to the state, instead of q."""
    if c.use_qk_l2norm:
        c.q, c.k, c.use_qk_l2norm = gating.l2norm(c.q), gating.l2norm(c.k), False
    c.k, c.scale = c.k * recurrence.softmax_scale(c.scale, c.q.shape[-1]), 1.0
    return run()


@mutant("sequence", needs="scale=0.0")
def scale_zero_is_default(c: SimpleNamespace, run: Run) -> Any:
    """`scale or default`: 0.0 becomes K**-0.5."""
    c.scale = c.scale or None
    return run()


@mutant("sequence")
def beta_ignored(c: SimpleNamespace, run: Run) -> Any:
    """beta is 1."""
    c.beta = torch.ones_like(c.beta)
    return run()


@mutant("sequence", subtle=True)
def beta_through_bf16(c: SimpleNamespace, run: Run) -> Any:
    """beta is rounded to bf16 before use."""
    c.beta = c.beta.bfloat16().to(c.beta.dtype)
    return run()
