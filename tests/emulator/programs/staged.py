"""y = x reversed by rows and columns, staged through shared memory, so that every element changes its thread."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    rows: int = 16
    columns: int = 128
    asynchronous: bool = False  # cp.async instead of loads and stores
    threads: int = 128


def build(config: Config) -> Any:
    R, C = config.rows, config.columns
    N = T.dynamic("N")

    @T.prim_func
    def staged(x: T.Tensor((N, R, C), "bfloat16"), y: T.Tensor((N, R, C), "float32")):
        with T.Kernel(N, threads=config.threads) as n:
            tile = T.alloc_shared((R, C), "bfloat16")
            if config.asynchronous:
                T.async_copy(x[n, 0:R, 0:C], tile)
                T.ptx_wait_group(0)
                T.sync_threads()
            else:
                T.copy(x[n, 0:R, 0:C], tile)
            for i, j in T.Parallel(R, C):
                y[n, i, j] = T.cast(tile[R - 1 - i, C - 1 - j], "float32")

    return staged
