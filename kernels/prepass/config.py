"""What the prepass program is built from; importing it needs no compiler, so that CPU tensors need none either."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration. The number of tokens, pitches and the range of beta are run-time arguments."""

    H: int
    HV: int
    gate_dtype: str = "bfloat16"  # of a and b
    bias_dtype: str = "float32"  # of dt_bias
    K: int = 128
    threads: int = 128
