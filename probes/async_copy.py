"""Does `T.async_copy` bring a state tile to shared memory past the registers?

The state of a slot is most of the bytes a kernel reads; it is requested first and awaited only before the product that
needs it. The copy must be cp.async (LDGSTS) of 16 bytes per thread and access, nothing of the tile may pass through a
register load, and after `T.ptx_wait_group(0)` and a barrier every thread must see the whole tile.
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
    """out[n] = pool[slots[n]] with its rows reversed, so that threads read what other threads fetched."""
    BV, K = config.BV, config.K
    N, SLOTS = T.dynamic("N"), T.dynamic("SLOTS")

    @T.prim_func
    def async_copy(
        pool: T.Tensor((SLOTS, BV, K), "bfloat16"),
        slots: T.Tensor((N,), "int32"),
        out: T.Tensor((N, BV, K), "bfloat16"),
    ):
        with T.Kernel(N, threads=config.threads) as n:
            tile = T.alloc_shared((BV, K), "bfloat16")
            T.async_copy(pool[slots[n], 0:BV, 0:K], tile)
            T.ptx_wait_group(0)
            T.sync_threads()
            for i, j in T.Parallel(BV, K):
                out[n, i, j] = tile[BV - 1 - i, j]

    return async_copy
