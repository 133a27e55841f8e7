"""Which gemm tiles does TileLang refuse for sm_90a?

Decode has one token per request, so ``T.gemm`` with one row would be its natural form. It must be refused at
compile time, with the text that the test expects, and the same program with an allowed tile must compile: the
design therefore pads tokens to tensor-core tiles in verify and uses no gemm for the single token of decode.
A tile that is no longer refused is a changed fact, and fails the probe.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    M: int
    N: int
    K: int = 128
    transpose_B: bool = True  # B is [N, K] in memory; False: row-major [K, N]
    threads: int = 128


def build(config: Config) -> Any:
    """C[M, N] = A[M, K] B, bf16 operands in shared memory, fp32 accumulators in registers."""
    M, N, K = config.M, config.N, config.K
    B_shape = (N, K) if config.transpose_B else (K, N)

    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor(B_shape, "bfloat16"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            A_shared = T.alloc_shared((M, K), "bfloat16")
            B_shared = T.alloc_shared(B_shape, "bfloat16")
            product = T.alloc_fragment((M, N), "float32")
            T.copy(A, A_shared)
            T.copy(B, B_shared)
            T.gemm(A_shared, B_shared, product, transpose_B=config.transpose_B, clear_accum=True)
            T.copy(product, C)

    return gemm
