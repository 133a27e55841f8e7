"""Are slots beyond 2^31 elements of a pool read and written where they are?

A pool of one layer passes 2^31 elements at production sizes, while slot indices are int32. The offset
slot * pitch must be computed in 64 bits for loads, stores and cp.async, from a slot read at run time.
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
    """out[n] = pool[slots[n]] by cp.async, then pool[slots[n]] doubles in place; slots lie `pitch` elements apart."""
    BV, K = config.BV, config.K
    N, SLOTS, pitch = T.dynamic("N"), T.dynamic("SLOTS"), T.dynamic("pitch")

    @T.prim_func
    def pool_offsets(
        pool: T.StridedTensor((SLOTS, BV, K), (pitch, K, 1), "bfloat16"),
        slots: T.Tensor((N,), "int32"),
        out: T.Tensor((N, BV, K), "bfloat16"),
    ):
        with T.Kernel(N, threads=config.threads) as n:
            T.assume(pitch % 8 == 0)
            slot = T.alloc_var("int32")
            slot = slots[n]
            tile = T.alloc_shared((BV, K), "bfloat16")
            state = T.alloc_fragment((BV, K), "float32")
            T.async_copy(pool[slot, 0:BV, 0:K], tile)
            T.copy(pool[slot, 0:BV, 0:K], state)
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(tile, out[n, 0:BV, 0:K])
            for i, j in T.Parallel(BV, K):
                state[i, j] = state[i, j] * 2.0
            T.copy(state, pool[slot, 0:BV, 0:K])

    return pool_offsets
