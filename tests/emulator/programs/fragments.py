"""C = A B^T by one warp that fills the fragments of mma.sync itself."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kernels.warp import mma
from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    K: int = 64


def build(config: Config) -> Any:
    K = config.K

    @T.prim_func
    def fragments(A: T.Tensor((16, K), "bfloat16"), B: T.Tensor((8, K), "bfloat16"), C: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            g, pair = lane // 4, lane % 4 * 2
            a = T.alloc_local((8,), "bfloat16")
            b = T.alloc_local((4,), "bfloat16")
            c = T.alloc_local((4,), "float32")
            T.clear(c)
            for k in T.serial(K // 16):
                for i in T.unroll(8):
                    a[i] = A[g + i // 2 % 2 * 8, k * 16 + i // 4 * 8 + pair + i % 2]
                for i in T.unroll(4):
                    b[i] = B[g, k * 16 + i // 2 * 8 + pair + i % 2]
                mma(a, 0, b, 0, c)
            for i in T.unroll(4):
                C[g + i // 2 * 8, pair + i % 2] = c[i]

    return fragments
