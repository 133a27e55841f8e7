"""Does the state tile meet all tokens in one Hopper tensor-core product?

Y[BV, N] = S[BV, K] X[N, K]^T with N = 32: sixteen rows of k and sixteen of q, raw bf16 as they lie in memory. It must
be wgmma (HGMMA) at both tile heights, exact for whole numbers, and as accurate as an fp32 sum for real data: bf16
operands have exact products, so only the accumulation rounds.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    BV: int
    N: int = 32
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """Y = S X^T: bf16 operands in shared memory, fp32 accumulators in registers."""
    BV, N, K = config.BV, config.N, config.K

    @T.prim_func
    def state_gemm(
        S: T.Tensor((BV, K), "bfloat16"),
        X: T.Tensor((N, K), "bfloat16"),
        Y: T.Tensor((BV, N), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            S_shared = T.alloc_shared((BV, K), "bfloat16")
            X_shared = T.alloc_shared((N, K), "bfloat16")
            product = T.alloc_fragment((BV, N), "float32")
            T.copy(S, S_shared)
            T.copy(X, X_shared)
            T.gemm(S_shared, X_shared, product, transpose_B=True, clear_accum=True)
            T.copy(product, Y)

    return state_gemm
