"""What the paged decode program is built from; importing it needs no compiler, so that CPU tensors need none either."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration. N, pool size, pitches and scales are run-time arguments."""

    H: int
    HV: int
    pool: str = "bfloat16"
    gate_dtype: str = "bfloat16"  # of a and b
    bias_dtype: str = "float32"  # of dt_bias
    l2norm: bool = True
    packed: bool = False  # takes mixed_qkv in place of q, k, v
    moves: bool = False  # takes write_indices: the state goes to another slot than it comes from
    K: int = 128
    V: int = 128
    lanes: int = 8  # that share a state row: 4, 8 or 16
    rows: int = 4  # of the state that a lane holds a part of
    few_rows: int = 2  # the same while requests are few
    few_up_to: int = 2048  # warps of `few_rows`
    threads: int = 32
    blocks_per_sm: int = 16  # caps registers at 128

    @property
    def raw_gates(self) -> bool:
        return True
