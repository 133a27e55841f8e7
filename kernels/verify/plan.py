"""Which program computes a verify, from shapes and dtypes alone.

Nothing here reads a tensor, a device or the environment.
"""

from __future__ import annotations

import functools

from kernels.runtime import Program
from kernels.tile import TM
from kernels.verify.config import Config

#: state shapes that the programs are built and tested for
SUPPORTED_K = (128,)
SUPPORTED_V = (64, 128, 256)


@functools.cache
def plan(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    pool: str,
    raw_gates: bool,
    gate_dtype: str,
    bias_dtype: str,
    l2norm: bool,
    commit: bool,
    max_tokens: int,
) -> Program:
    """The program for these static facts. `max_tokens` bounds the tokens of any one request.

    N, the pool size and all pitches are run-time arguments of every program: they never cause a compilation.
    """
    config = Config(
        H=H,
        HV=HV,
        pool=pool,
        raw_gates=raw_gates,
        gate_dtype=gate_dtype,
        bias_dtype=bias_dtype,
        l2norm=l2norm,
        commit=commit,
        # One block is one row tile of the tensor cores; only longer requests pay for carrying the fp32 state over.
        blocks=max_tokens > TM,
        K=K,
        V=V,
    )
    return Program("kernels.verify.chunk", config)
