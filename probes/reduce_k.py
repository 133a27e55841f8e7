"""What does `T.reduce_sum` over K of a [BV, K] fragment cost?

The recurrent form needs S k and S q, sums over the axis that a row's threads share. The sum must stay inside a warp:
shuffles, no block barrier and no shared memory, with the accuracy of an fp32 sum.
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
    """out[v] = sum over k of S[v, k] x[k], all fp32."""
    BV, K = config.BV, config.K

    @T.prim_func
    def reduce_k(
        state: T.Tensor((BV, K), "float32"),
        x: T.Tensor((K,), "float32"),
        out: T.Tensor((BV,), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            S = T.alloc_fragment((BV, K), "float32")
            y = T.alloc_fragment((BV,), "float32")
            T.copy(state, S)
            for i, j in T.Parallel(BV, K):
                S[i, j] = S[i, j] * x[j]
            T.reduce_sum(S, y, dim=1)
            T.copy(y, out)

    return reduce_k
