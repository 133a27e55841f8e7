"""The paged decode program, from shapes and dtypes alone. Nothing here reads a tensor, a device or the environment."""

from __future__ import annotations

import functools

from kernels.decode.config import Config
from kernels.runtime import Program


@functools.cache
def plan(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    pool: str,
    gate_dtype: str,
    bias_dtype: str,
    l2norm: bool,
    packed: bool,
    moves: bool,
) -> Program:
    """The program for these static facts; N, the pool size and all pitches are run-time arguments of it."""
    # A warp has 4 KiB of state, or 2 KiB while requests are few (specs/design/tuning.md).
    rows = 2 if pool == "float32" else 4
    config = Config(
        H=H,
        HV=HV,
        pool=pool,
        gate_dtype=gate_dtype,
        bias_dtype=bias_dtype,
        l2norm=l2norm,
        packed=packed,
        moves=moves,
        K=K,
        V=V,
        rows=rows,
        few_rows=rows // 2,
    )
    return Program("kernels.decode.paged", config)
