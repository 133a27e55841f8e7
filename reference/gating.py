"""Gates and norms of Gated DeltaNet.

One rule for dtypes: every function computes and returns in the widest dtype among its arguments, and never
below fp32. A bf16 `a` is therefore widened before `dt_bias` is added, and fp64 arguments stay fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

THRESHOLD = 20.0  # torch.nn.functional.softplus: above it, softplus(x) = x


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype of `tensors`, at least fp32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) with torch's definition: beta 1, and x itself above the threshold 20.

    The exponent is clamped, because a where() evaluates both branches and exp(x) overflows in the one not
    taken; log1p keeps the tail, where 1 + exp(x) would round to 1.
    """
    x = x.to(working_dtype(x))
    return torch.where(x > THRESHOLD, x, torch.log1p(torch.exp(x.clamp(max=THRESHOLD))))


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), the log of the state's decay (<= 0).

    Args:
        A_log, dt_bias: [HV], any float dtype.
        a: [..., HV].

    For x = a + dt_bias < -20 the product is taken in the exponent, exp(A_log + x) * (1 - exp(x) / 2), with
    two terms of log1p's series: exp(A_log) = inf then never meets softplus(x) = 0, which would be NaN. Where
    the plain product is finite the two agree to rounding (the sum A_log + x is rounded once more). g = -inf,
    where exp(A_log) alone overflows, is a legal result: the decay is zero.
    """
    dtype = working_dtype(A_log, a, dt_bias)
    A_log, x = A_log.to(dtype), a.to(dtype) + dt_bias.to(dtype)
    tail = torch.exp(A_log + x) * (1 - torch.exp(x) / 2)
    return -torch.where(x < -THRESHOLD, tail, torch.exp(A_log) * softplus(x))


def beta(b: Tensor, allow_neg_eigval: bool = False) -> Tensor:
    """sigmoid(b), doubled if the transition I - beta k k^T may have the eigenvalue -1. Shape of `b`."""
    rate = torch.sigmoid(b.to(working_dtype(b)))
    return 2 * rate if allow_neg_eigval else rate


def gates(
    A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, allow_neg_eigval: bool = False
) -> tuple[Tensor, Tensor]:
    """(g, beta) of the raw gates: `log_decay` and `beta`."""
    return log_decay(A_log, a, dt_bias), beta(b, allow_neg_eigval)


def inverse_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """1 / sqrt(sum x^2 + eps) over the last dim, which is gone from the result; eps is inside the root."""
    x = x.to(working_dtype(x))
    return torch.rsqrt(x.square().sum(-1) + eps)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim; a zero vector stays zero."""
    return x.to(working_dtype(x)) * inverse_norm(x, eps)[..., None]
