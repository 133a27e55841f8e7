"""y[n] = x[n] * factor + shift with a strided x, a tensor of N + 1 offsets and scalar parameters."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    columns: int = 64
    threads: int = 32


def build(config: Config) -> Any:
    C = config.columns
    N, M, row_stride = T.dynamic("N"), T.dynamic("M"), T.dynamic("row_stride")

    @T.prim_func
    def strided(
        x: T.StridedTensor((M, C), (row_stride, 1), "float16"),
        offsets: T.Tensor((N + 1,), "int32"),
        factor: T.float32,
        shift: T.int32,
        y: T.Tensor((N, C), "float16"),
    ):
        with T.Kernel(N, threads=config.threads) as n:
            for j in T.Parallel(C):
                y[n, j] = T.cast(T.cast(x[offsets[n], j], "float32") * factor, "float16")
                if offsets[n + 1] - offsets[n] > 1:
                    y[n, j] = y[n, j] + T.cast(shift, "float16")

    return strided
