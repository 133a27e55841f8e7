"""Is the Gram product of a token block one small warp-level tensor-core product?

The block's keys and queries, R = 32 rows of raw bf16, meet each other: G = X X^T holds every k.k and q.k, and its
diagonal the squared norms. Both operands are the same tile. Below 64 rows it must be mma.sync (HMMA, not HGMMA), exact
for whole numbers, and as accurate as an fp32 sum.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    R: int = 32
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """G[R, R] = X X^T, bf16 operands, fp32 accumulators."""
    R, K = config.R, config.K

    @T.prim_func
    def gram(X: T.Tensor((R, K), "bfloat16"), G: T.Tensor((R, R), "float32")):
        with T.Kernel(1, threads=config.threads):
            X_shared = T.alloc_shared((R, K), "bfloat16")
            product = T.alloc_fragment((R, R), "float32")
            T.copy(X, X_shared)
            T.gemm(X_shared, X_shared, product, transpose_B=True, clear_accum=True)
            T.copy(product, G)

    return gram
