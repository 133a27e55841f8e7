"""The programs of replay, from shapes and dtypes alone. Nothing here reads a tensor, a device or the environment."""

from __future__ import annotations

import functools

from kernels.replay.config import Config, CursorConfig, FoldConfig, WindowConfig
from kernels.runtime import Program
from kernels.tile import TM

#: tokens of the longest request
MOST_TOKENS = TM


@functools.cache
def plan(*, H: int, HV: int, K: int, V: int, pool: str, gate_dtype: str, bias_dtype: str, l2norm: bool) -> Program:
    """The program of verify for these static facts; N, the pool size and all pitches are run-time arguments of it."""
    # Three CTAs share an SM, unless 168 registers would not do: a spilled one costs more than the third CTA gives.
    per_sm = 3 if pool == "bfloat16" and V <= 128 and gate_dtype != "float32" else 2
    config = Config(
        H=H, HV=HV, pool=pool, gate_dtype=gate_dtype, bias_dtype=bias_dtype, l2norm=l2norm, K=K, V=V,
        tiles=_tiles(pool, V), ctas=132 * per_sm, blocks_per_sm=per_sm,
    )  # fmt: skip
    return Program("kernels.replay.outputs", config)


@functools.cache
def fold_plan(*, H: int, HV: int, K: int, V: int, pool: str, gate_dtype: str, bias_dtype: str, l2norm: bool) -> Program:
    """The program of commit, in the same way."""
    config = FoldConfig(
        H=H, HV=HV, pool=pool, gate_dtype=gate_dtype, bias_dtype=bias_dtype, l2norm=l2norm, K=K, V=V,
        tiles=_tiles(pool, V), parts=3 if pool == "float32" else 2,
    )  # fmt: skip
    return Program("kernels.replay.fold", config)


@functools.cache
def window_plan(
    *, H: int, HV: int, K: int, V: int, pool: str, gate_dtype: str, bias_dtype: str, l2norm: bool
) -> Program:
    """The program of a verify behind a ring, in the same way."""
    # With four tiles 255 registers would not do for the parts of an fp16 state.
    tiles = min(2, _tiles(pool, V)) if pool == "float16" else _tiles(pool, V)
    config = WindowConfig(
        H=H, HV=HV, pool=pool, gate_dtype=gate_dtype, bias_dtype=bias_dtype, l2norm=l2norm, K=K, V=V, tiles=tiles,
        parts=3 if pool == "float32" else 2,
    )  # fmt: skip
    return Program("kernels.replay.window", config)


@functools.cache
def cursors_plan() -> Program:
    """The program that moves the cursors of a ring."""
    return Program("kernels.replay.cursors", CursorConfig())


def _tiles(pool: str, V: int) -> int:
    """A warp holds its rows of the state in 64 registers a lane, or in fewer while requests are few."""
    return min(2 if pool == "float32" else 4, V // 32)
