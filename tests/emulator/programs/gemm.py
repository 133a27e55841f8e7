"""C = A B^T through shared memory: wgmma for M >= 64, mma.sync below; A optionally from registers."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    M: int = 64
    N: int = 32
    K: int = 128
    dtype: str = "bfloat16"
    threads: int = 128
    a_in_registers: bool = False
    b_transposed: bool = True  # B is [N, K] in memory; False: [K, N]
    parts: int = 1  # the product in this many T.gemm calls in flight at once


def build(config: Config) -> Any:
    M, N, K, dtype, parts = config.M, config.N, config.K, config.dtype, config.parts
    KP = K // parts
    transpose = config.b_transposed
    B_shape, B_tile = ((N, K), (N, KP)) if transpose else ((K, N), (KP, N))

    @T.prim_func
    def gemm(A: T.Tensor((M, K), dtype), B: T.Tensor(B_shape, dtype), C: T.Tensor((M, N), "float32")):
        with T.Kernel(1, threads=config.threads):
            A_sh = T.alloc_shared((parts, M, KP), dtype)
            A_reg = T.alloc_fragment((M, KP), dtype)
            B_sh = T.alloc_shared((parts, *B_tile), dtype)
            acc = T.alloc_fragment((M, N), "float32")
            for p in T.unroll(parts):
                T.copy(A[0:M, p * KP : (p + 1) * KP], A_sh[p, 0:M, 0:KP])
                if transpose:
                    T.copy(B[0:N, p * KP : (p + 1) * KP], B_sh[p, 0:N, 0:KP])
                else:
                    T.copy(B[p * KP : (p + 1) * KP, 0:N], B_sh[p, 0:KP, 0:N])
            T.clear(acc)
            if config.a_in_registers:
                T.copy(A_sh[0, 0:M, 0:KP], A_reg)
                T.gemm(A_reg, B_sh[0, 0 : B_tile[0], 0 : B_tile[1]], acc, transpose_B=transpose)
            elif parts == 1:
                T.gemm(A_sh[0, 0:M, 0:KP], B_sh[0, 0 : B_tile[0], 0 : B_tile[1]], acc, transpose_B=transpose)
            else:
                for p in T.unroll(parts):
                    T.wgmma_gemm(A_sh[p, 0:M, 0:KP], B_sh[p, 0 : B_tile[0], 0 : B_tile[1]], acc, transpose_B=transpose)
                T.wait_wgmma(0)
            T.copy(acc, C)

    return gemm
