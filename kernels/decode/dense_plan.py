"""The dense program's configuration, from shapes and dtypes alone. Nothing here reads a tensor, a device or the
environment."""

from __future__ import annotations

import functools

from kernels.decode.dense_config import Config, Lengths
from kernels.runtime import Program


@functools.cache
def plan(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: str,
    l2norm: bool,
    has_initial: bool,
    stores_final: bool,
    lengths: Lengths,
    index: str,
    v_first: bool,
    head_batch: int | None = None,
) -> Program:
    """The program for these static facts.

    The number of requests, their tokens and all pitches are run-time arguments: they never cause a compilation.
    """
    config = Config(
        H=H,
        HV=HV,
        dtype=dtype,
        l2norm=l2norm,
        has_initial=has_initial,
        stores_final=stores_final,
        lengths=lengths,
        index=index,
        v_first=v_first,
        K=K,
        V=V,
        # L1 serves k and q of a token to all warps that want them; a CTA need not be of one key head for that.
        head_batch=head_batch or 1,
    )
    return Program("kernels.decode.dense_program", config)
