"""The gates in arbitrary precision: the formulas as they are written, with no care for range or rounding."""

from __future__ import annotations

import mpmath
import torch
from torch import Tensor

DIGITS = 60


def softplus(x: float) -> mpmath.mpf:
    return mpmath.mpf(x) if x > 20 else mpmath.log1p(mpmath.exp(mpmath.mpf(x)))


def log_decay(A_log: float, a: float, dt_bias: float) -> mpmath.mpf:
    with mpmath.workdps(DIGITS):
        return -mpmath.exp(mpmath.mpf(A_log)) * softplus(float(mpmath.mpf(a) + mpmath.mpf(dt_bias)))


def sigmoid(b: float) -> mpmath.mpf:
    with mpmath.workdps(DIGITS):
        return 1 / (1 + mpmath.exp(-mpmath.mpf(b)))


def rel_error(x: float, exact: mpmath.mpf) -> float:
    with mpmath.workdps(DIGITS):
        return float(abs(mpmath.mpf(x) - exact) / abs(exact)) if exact else abs(x)


def gates(A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, allow_neg_eigval: bool) -> tuple[Tensor, Tensor]:
    """(g, beta) in fp64: A_log, dt_bias [HV], a, b [T, HV]."""
    A, bias = A_log.double().tolist(), dt_bias.double().tolist()
    g = [[float(log_decay(A[h], x, bias[h])) for h, x in enumerate(row)] for row in a.double().tolist()]
    beta = [[float(sigmoid(x)) for x in row] for row in b.double().tolist()]
    factor = 2 if allow_neg_eigval else 1
    return torch.tensor(g, dtype=torch.float64), factor * torch.tensor(beta, dtype=torch.float64)
