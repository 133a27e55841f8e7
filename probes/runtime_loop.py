"""Is `T.serial(L)`, with L read from a tensor, one plain loop?

Requests of one launch have different numbers of tokens, 0 included, so the token loop's length is only known to the
kernel. It must run exactly L times, carry a register fragment from token to token, and be run by the threads that were
asked for: no specialised roles, no second launch, no spills.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    D: int = 128
    threads: int = 128


def build(config: Config) -> Any:
    """out[n] = the linear recurrence s = s / 2 + x[t] over the first lengths[n] rows of x, from s = 0."""
    D = config.D
    N, NT = T.dynamic("N"), T.dynamic("NT")

    @T.prim_func
    def runtime_loop(
        x: T.Tensor((NT, D), "float32"),
        lengths: T.Tensor((N,), "int32"),
        out: T.Tensor((N, D), "float32"),
    ):
        with T.Kernel(N, threads=config.threads) as n:
            length = T.alloc_var("int32")
            length = lengths[n]
            s = T.alloc_fragment((1, D), "float32")
            T.clear(s)
            for t in T.serial(length):
                for i, j in T.Parallel(1, D):
                    s[i, j] = s[i, j] * 0.5 + x[t, j]
            T.copy(s, out[n : n + 1, 0:D])

    return runtime_loop
