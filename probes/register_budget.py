"""How many V rows of the state can a CTA keep in registers through a token loop that stores every state?

S_t = e^{g_t} S_{t-1} + u_t k_t^T with an fp32 S[BV, K] spread over 128 threads: BV * K / 128 registers before anything
else. No tile may spill, and tiles of 32 and 64 rows must leave registers for four CTAs per SM; what 128 rows leave is
recorded.
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
    TM: int = 16
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """states[t] = bf16 of S after token t < lengths[0], from S = state, with decay [TM], u [TM, BV] and k [TM, K]."""
    BV, TM, K = config.BV, config.TM, config.K

    @T.prim_func
    def register_budget(
        lengths: T.Tensor((1,), "int32"),
        state: T.Tensor((BV, K), "bfloat16"),
        decay: T.Tensor((TM,), "float32"),
        u: T.Tensor((TM, BV), "float32"),
        k: T.Tensor((TM, K), "float32"),
        states: T.Tensor((TM, BV, K), "bfloat16"),
    ):
        with T.Kernel(1, threads=config.threads):
            decay_shared = T.alloc_shared((TM,), "float32")
            u_shared = T.alloc_shared((TM, BV), "float32")
            k_shared = T.alloc_shared((TM, K), "float32")
            S = T.alloc_fragment((BV, K), "float32")
            T.copy(decay, decay_shared)
            T.copy(u, u_shared)
            T.copy(k, k_shared)
            T.copy(state, S)
            T.sync_threads()
            for t in T.serial(lengths[0]):
                for i, j in T.Parallel(BV, K):
                    S[i, j] = S[i, j] * decay_shared[t] + u_shared[t, i] * k_shared[t, j]
                T.copy(S, states[t, 0:BV, 0:K])

    return register_budget
