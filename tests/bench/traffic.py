"""Pure traffic in the kernels' own layout: the time that the bytes alone take.

One CTA moves BV rows of one head's state, as the verify program does, and computes nothing. States are rows of 32-bit
words, whatever they hold. `pattern`:
    read       every tile of the pool once
    write      STEPS tiles of the snapshot buffer
    snapshots  reads one tile, writes it STEPS times: what verify with per-token states must do; with `bulk` each warp
               writes its rows by bulk copies from shared memory, as the chunk program does
    in-place   reads one tile, writes it back negated (the same values would be no store): what decode must do
    copy       reads one tile, writes it to another buffer: what a commit must do, and decode from state to state
    nothing    an empty kernel: the cost of a launch
Like ours, every program lets the next launch begin once its loads are issued, and waits for the one before it.
"""

# mypy: disable-error-code="no-untyped-def, valid-type, index"
import dataclasses
from typing import Any

import tilelang.language as T

from kernels.warp import bulk_store

PASS_CONFIGS: dict[str, Any] = {"tl.disable_warp_specialized": True}
PATTERNS = ("read", "write", "snapshots", "in-place", "copy", "nothing")


@dataclasses.dataclass(frozen=True)
class Config:
    pattern: str
    HV: int = 32
    V: int = 128
    words: int = 64  # 32-bit words of a row: K = 128 in bf16
    BV: int = 64
    threads: int = 128
    bulk: bool = False  # of snapshots alone


def build(c: Config) -> Any:
    """Parameters, all fp32: pool [N, HV, V, words], states [N, STEPS, HV, V, words], sink [1].

    The sink is written only where the pool holds 1e30, which keeps the reads alive. Raises ValueError for a `bulk`
    pattern other than snapshots.
    """
    if c.bulk and c.pattern != "snapshots":
        raise ValueError(f"pattern is {c.pattern}, must be snapshots with bulk copies; pass bulk=False")
    N, STEPS = T.dynamic("N"), T.dynamic("STEPS")
    PoolT = T.Tensor((N, c.HV, c.V, c.words), "float32")
    StatesT = T.Tensor((N, STEPS, c.HV, c.V, c.words), "float32")
    v_tiles = c.V // c.BV
    rows = c.BV * 32 // c.threads  # of a warp

    @T.prim_func
    def traffic(pool: PoolT, states: StatesT, sink: T.Tensor((1,), "float32")):
        with T.Kernel(N * c.HV * v_tiles if c.pattern != "nothing" else 1, threads=c.threads) as cta:
            tx = T.get_thread_binding()
            T.pdl_sync()
            v0 = cta % v_tiles * c.BV
            h = cta // v_tiles % c.HV
            n = cta // (v_tiles * c.HV)
            S = T.alloc_fragment((c.BV, c.words), "float32")
            if c.pattern == "write":
                T.clear(S)
            elif c.pattern != "nothing":
                T.copy(pool[n, h, v0 : v0 + c.BV, 0 : c.words], S)
            T.pdl_trigger()
            if c.pattern == "nothing":
                if sink[0] > 1e30:
                    sink[0] = 0.0
            elif c.pattern == "read":
                largest = T.alloc_fragment((c.BV,), "float32")
                T.reduce_max(S, largest, dim=1)
                for i in T.Parallel(c.BV):
                    if largest[i] > 1e30:
                        sink[0] = largest[i]
            elif c.pattern == "in-place":
                for i, j in T.Parallel(c.BV, c.words):
                    pool[n, h, v0 + i, j] = -S[i, j]
            elif c.pattern == "copy":
                T.copy(S, states[n, 0, h, v0 : v0 + c.BV, 0 : c.words])
            elif c.bulk:
                stage = T.alloc_shared((c.BV, c.words), "float32")
                T.copy(S, stage)
                T.fence_proxy_async()
                T.sync_threads()
                if tx % 32 == 0:
                    r = tx // 32 * rows
                    for t in T.serial(STEPS):
                        bulk_store(states[n, t, h, v0 + r, 0], stage[r, 0], rows * c.words, rows * c.words * 4)
                    T.tma_store_wait(0)
            else:
                for t in T.serial(STEPS):
                    T.copy(S, states[n, t, h, v0 : v0 + c.BV, 0 : c.words])

    return traffic
