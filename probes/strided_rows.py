"""Do token rows with a run-time pitch still move 16 bytes per access?

q, k and v are views of one projection row: the pitch between tokens is known at launch only. An address that the
compiler cannot prove aligned becomes a 2-byte load per element, and cp.async is refused. ``T.assume(pitch % 8 == 0)``
must make plain copies, guarded copies and cp.async 16 bytes wide. The promise is the caller's: the API checks it.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE

TM = 16


@dataclasses.dataclass(frozen=True)
class Config:
    aligned: bool  # promise the compiler that the pitch is a multiple of 8 elements
    asynchronous: bool = True  # also fetch through cp.async
    H: int = 2
    K: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """out[i] = head 1 of TM tokens from starts[0]; i = 0: plain copy, 1: guarded with t < 13, 2: cp.async."""
    H, K = config.H, config.K
    NT, pitch = T.dynamic("NT"), T.dynamic("pitch")

    @T.prim_func
    def strided_rows(
        x: T.StridedTensor((NT, H, K), (pitch, K, 1), "bfloat16"),
        starts: T.Tensor((1,), "int32"),
        out: T.Tensor((3, TM, K), "bfloat16"),
    ):
        with T.Kernel(1, threads=config.threads):
            if config.aligned:
                T.assume(pitch % 8 == 0)
            t0 = T.alloc_var("int32")
            t0 = starts[0]
            plain = T.alloc_shared((TM, K), "bfloat16")
            guarded = T.alloc_shared((TM, K), "bfloat16")
            fetched = T.alloc_shared((TM, K), "bfloat16")
            T.copy(x[t0 : t0 + TM, 1, 0:K], plain)
            for t, j in T.Parallel(TM, K):
                guarded[t, j] = T.if_then_else(t < 13, x[t0 + t, 1, j], T.bfloat16(0))
            if config.asynchronous:
                T.async_copy(x[t0 : t0 + TM, 1, 0:K], fetched)
                T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(plain, out[0, 0:TM, 0:K])
            T.copy(guarded, out[1, 0:TM, 0:K])
            if config.asynchronous:
                T.copy(fetched, out[2, 0:TM, 0:K])

    return strided_rows
