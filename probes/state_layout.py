"""Does one register tile S[v, k] read and write both state layouts, K-major [K, V] and V-major [V, K]?

Pools are V-major; transformers' states and the decode entry point are K-major. The tile must come from one and go to
the other by index alone, exactly, for K != V (a square state hides a transposed store), and without a spill. A tile has
one thread layout: whichever side it suits moves 16 bytes per access, the other one element.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    K: int = 128
    V: int = 96
    BV: int = 32
    threads: int = 128


def build(config: Config) -> Any:
    """v_major[h] and k_major_out[h] = the state in k_major[h], one CTA per BV columns of V and head."""
    K, V, BV = config.K, config.V, config.BV
    H = T.dynamic("H")

    @T.prim_func
    def state_layout(
        k_major: T.Tensor((H, K, V), "float32"),
        v_major: T.Tensor((H, V, K), "float32"),
        k_major_out: T.Tensor((H, K, V), "float32"),
    ):
        with T.Kernel(H * (V // BV), threads=config.threads) as cta:
            h = cta // (V // BV)
            v0 = cta % (V // BV) * BV
            S = T.alloc_fragment((BV, K), "float32")
            for i, j in T.Parallel(BV, K):
                S[i, j] = k_major[h, j, v0 + i]
            T.copy(S, v_major[h, v0 : v0 + BV, 0:K])
            for i, j in T.Parallel(BV, K):
                k_major_out[h, j, v0 + i] = S[i, j]

    return state_layout
