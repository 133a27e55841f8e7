"""How accurate are the functions of the gates, over all inputs?

log, log1p, exp, exp2, rsqrt, sqrt and sigmoid must lower for sm_90a, and with softplus (threshold 20) stay within a
few ulp of fp64 at every bf16 value, infinities and NaN included, because the raw gates are bf16.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from probes import SINGLE_ROLE

PASS_CONFIGS = SINGLE_ROLE

SOFTPLUS_THRESHOLD = 20.0


def _softplus(x: Any) -> Any:
    """log(1 + exp(x)), and x itself above the threshold; a min() on the way to exp would turn NaN into a number."""
    return T.if_then_else(x > SOFTPLUS_THRESHOLD, x, T.log1p(T.exp(x)))


FUNCTIONS: dict[str, Any] = {
    "log": T.log,
    "log1p": T.log1p,
    "exp": T.exp,
    "exp2": T.exp2,
    "rsqrt": T.rsqrt,
    "sqrt": T.sqrt,
    "sigmoid": T.sigmoid,
    "softplus": _softplus,
}


@dataclasses.dataclass(frozen=True)
class Config:
    threads: int = 128


def build(config: Config) -> Any:
    """out[f, i] = f-th of FUNCTIONS at x[i], fp32."""
    rows, threads = len(FUNCTIONS), config.threads
    n = T.dynamic("n")

    @T.prim_func
    def math_primitives(x: T.Tensor((n,), "float32"), out: T.Tensor((rows, n), "float32")):
        with T.Kernel(T.ceildiv(n, threads), threads=threads) as block:
            i = block * threads + T.get_thread_binding()
            if i < n:
                for row, function in enumerate(FUNCTIONS.values()):
                    out[row, i] = function(x[i])

    return math_primitives
