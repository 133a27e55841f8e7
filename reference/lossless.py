"""The recurrence of successive decode calls: the state is rounded to its pool's dtype after every token.

    S_t = round(exp(g_t) S_{t-1} + u_t k_t^T)           u_t and o_t are those of recurrence.py, from S_{t-1} as stored

`o_t` reads the state before it is rounded, as a decode call does, which rounds what it stores and nothing else.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from reference.recurrence import Recurrence, delta_step, recurrent


def stored_as(dtype: torch.dtype) -> Recurrence:
    """`recurrence.recurrent`, with every state rounded to `dtype` before the next token reads it.

    The states that it returns are the rounded ones, in the arithmetic's dtype.
    """

    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        S, o = delta_step(S, q, k, v, g, beta)
        return S.to(dtype).to(S.dtype), o

    return functools.partial(recurrent, step=step)
