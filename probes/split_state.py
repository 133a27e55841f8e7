"""Can a state wider than bf16 use the bf16 tensor cores without losing accuracy?

A bf16 value holds 8 significant bits, so an fp32 state (24 bits) is the exact sum of three bf16 parts and an fp16 state
(11 bits) of two. Products of the parts accumulate into the same fp32 registers. The parts must add up to the state bit
for bit, and the product must be as accurate as an fp32 sum; one part alone must not be.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    dtype: str  # of the state: "float32" or "float16"
    parts: int  # bf16 parts that are multiplied
    BV: int = 64
    N: int = 32
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """parts[p] = the p-th bf16 part of S, the largest first; Y = (sum of the parts) X^T."""
    BV, N, K, P = config.BV, config.N, config.K, config.parts

    @T.prim_func
    def split_state(
        S: T.Tensor((BV, K), config.dtype),
        X: T.Tensor((N, K), "bfloat16"),
        parts: T.Tensor((P, BV, K), "bfloat16"),
        Y: T.Tensor((BV, N), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            rest = T.alloc_fragment((BV, K), "float32")
            part = T.alloc_shared((BV, K), "bfloat16")
            X_shared = T.alloc_shared((N, K), "bfloat16")
            product = T.alloc_fragment((BV, N), "float32")
            T.copy(X, X_shared)
            for i, j in T.Parallel(BV, K):
                rest[i, j] = T.cast(S[i, j], "float32")
            T.clear(product)
            for p in T.unroll(P):
                for i, j in T.Parallel(BV, K):
                    part[i, j] = T.cast(rest[i, j], "bfloat16")
                for i, j in T.Parallel(BV, K):
                    rest[i, j] = rest[i, j] - T.cast(part[i, j], "float32")
                T.sync_threads()
                T.gemm(part, X_shared, product, transpose_B=True)
                T.copy(part, parts[p, 0:BV, 0:K])
                T.sync_threads()
            T.copy(product, Y)

    return split_state
