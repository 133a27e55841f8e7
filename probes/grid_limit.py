"""Which grid axis can hold requests times heads?

CUDA allows 2^31 - 1 blocks on x and 65535 on y and z. 2048 requests of 32 heads already pass that, so programs put
N * HV on x; the same launch on y must be an error, never a silent partial result.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE


@dataclasses.dataclass(frozen=True)
class Config:
    axis: str  # "x" or "y"


def build(config: Config) -> Any:
    """out[i] = i for i < N, one block each."""
    N = T.dynamic("N")
    grid = (N, 1) if config.axis == "x" else (1, N)

    @T.prim_func
    def grid_limit(out: T.Tensor((N,), "int32")):
        with T.Kernel(*grid, threads=32) as (x, y):
            if T.get_thread_binding() == 0:
                out[x + y] = x + y

    return grid_limit
