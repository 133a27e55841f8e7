"""y = x with the columns of each row reversed: a warp builds a row in one of two shared buffers in turn, and a bulk
store carries it to y while the warp builds the next one in the other."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kernels.warp import bulk_store
from tests.emulator import programs

__all__ = ["PASS_CONFIGS", "Config", "build"]

#: the order within a warp is the program's own
PASS_CONFIGS: dict[str, Any] = {**programs.PASS_CONFIGS, "tl.disable_thread_storage_sync": True}


@dataclass(frozen=True)
class Config:
    warps: int = 2
    rows: int = 6  # of a warp
    columns: int = 64  # of 4 bytes


def build(config: Config) -> Any:
    W, R, C = config.warps, config.rows, config.columns
    N = T.dynamic("N")

    @T.prim_func
    def bulk(x: T.Tensor((N, W, R, C), "float32"), y: T.Tensor((N, W, R, C), "float32")):
        with T.Kernel(N, threads=32 * W) as n:
            tx = T.get_thread_binding()
            warp, lane = tx // 32, tx % 32
            rows = T.alloc_shared((W, 2, C), "float32")
            for r in T.serial(R):
                if lane == 0:
                    T.tma_store_wait(1)
                T.sync_warp()
                for i in T.unroll(C // 32):
                    rows[warp, r % 2, i * 32 + lane] = x[n, warp, r, C - 1 - i * 32 - lane]
                T.fence_proxy_async()
                T.sync_warp()
                if lane == 0:
                    bulk_store(y[n, warp, r, 0], rows[warp, r % 2, 0], C, C * 4)
            if lane == 0:
                T.tma_store_wait(0)

    return bulk
