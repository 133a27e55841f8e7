"""Is the rank-one update S[v, k] = e S[v, k] + u[v] k[k] elementwise work on registers?

Two vectors with different axes meet a two-dimensional fragment whose thread layout neither of them shares. It must
lower without a gemm and without staging the state: one fused multiply-add per element after the decay, no spills.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    BV: int = 64
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """state = decay[0] state + u k^T, in place."""
    BV, K = config.BV, config.K

    @T.prim_func
    def outer_product(
        decay: T.Tensor((1,), "float32"),
        u: T.Tensor((BV,), "float32"),
        k: T.Tensor((K,), "float32"),
        state: T.Tensor((BV, K), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            u_shared = T.alloc_shared((BV,), "float32")
            k_shared = T.alloc_shared((K,), "float32")
            S = T.alloc_fragment((BV, K), "float32")
            T.copy(u, u_shared)
            T.copy(k, k_shared)
            T.copy(state, S)
            for i, j in T.Parallel(BV, K):
                S[i, j] = S[i, j] * decay[0] + u_shared[i] * k_shared[j]
            T.copy(S, state)

    return outer_product
