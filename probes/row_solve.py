"""Does the T x T triangular solve of a V row fit in one thread's registers?

(I + L) u = r with L strictly lower triangular, shared by all rows, and one right-hand side per V row. One thread owns
one row; with the token loop unrolled, every u_i must be a register: no local memory (LDL, STL, stack), no spills, no
shuffles.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    TM: int = 16
    BV: int = 128


def build(config: Config) -> Any:
    """u[:, v] = (I + L)^-1 r[:, v] by forward substitution, thread v owns row v."""
    TM, BV = config.TM, config.BV

    @T.prim_func
    def row_solve(
        L: T.Tensor((TM, TM), "float32"),
        r: T.Tensor((TM, BV), "float32"),
        u: T.Tensor((TM, BV), "float32"),
    ):
        with T.Kernel(1, threads=BV):
            row = T.get_thread_binding()
            L_shared = T.alloc_shared((TM, TM), "float32")
            solved = T.alloc_local((TM,), "float32")
            acc = T.alloc_var("float32")
            T.copy(L, L_shared)
            T.sync_threads()
            for t in T.unroll(TM):
                acc = r[t, row]
                for i in T.unroll(t):
                    acc -= L_shared[t, i] * solved[i]
                solved[t] = acc
            for t in T.unroll(TM):
                u[t, row] = solved[t]

    return row_solve
