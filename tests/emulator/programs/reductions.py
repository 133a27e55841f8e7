"""Row sums over a block of threads, over one warp, and a running sum along rows."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    rows: int = 8
    columns: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    R, C = config.rows, config.columns

    @T.prim_func
    def reductions(
        x: T.Tensor((R, C), "float32"),
        sums: T.Tensor((R,), "float32"),
        largest: T.Tensor((1,), "float32"),
        running: T.Tensor((R, C), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            tile = T.alloc_fragment((R, C), "float32")
            row = T.alloc_fragment((R,), "float32")
            line = T.alloc_fragment((1, C), "float32")
            top = T.alloc_fragment((1,), "float32")
            shared = T.alloc_shared((R, C), "float32")
            T.copy(x, tile)
            T.reduce_sum(tile, row, dim=1)
            T.copy(row, sums)
            T.copy(x[0:1, 0:C], line)
            T.reduce_max(line, top, dim=1)
            T.copy(top, largest)
            T.copy(x, shared)
            T.cumsum(shared, dim=1)
            T.copy(shared, running)

    return reductions
