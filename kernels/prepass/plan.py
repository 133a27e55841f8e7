"""Which program computes a prepass, and whether one pays: from shapes and dtypes alone.

Nothing here reads a tensor, a device or the environment.
"""

from __future__ import annotations

import functools

from kernels.prepass.config import Config
from kernels.runtime import Program


def should_use_prepass(N: int, NT: int, H: int, HV: int) -> bool:
    """Whether a verify of NT tokens in N requests is faster behind a prepass: at no shape.

    The V tiles of a verify do compute gates and norms several times over, but while they wait for the state, so that
    leaving it out shortens nothing; norms are the diagonal of a product that the solve needs anyway. A second launch
    is therefore pure cost. The times of both, side by side: specs/gates/gate4.md.
    """
    return False


@functools.cache
def plan(*, H: int, HV: int, K: int, gate_dtype: str, bias_dtype: str) -> Program:
    """The program for these static facts; the number of tokens and all pitches never cause a compilation."""
    return Program("kernels.prepass.program", Config(H=H, HV=HV, gate_dtype=gate_dtype, bias_dtype=bias_dtype, K=K))
