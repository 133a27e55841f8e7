"""What the verify program is built from; importing it needs no compiler, so that CPU tensors need none either."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

#: exact bf16 parts of a pool element
PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}

#: state rows of a warp of the chunk program: the columns of one tensor-core product
ROWS_PER_WARP = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration. N, tokens, pool size, pitches and scales are run-time arguments."""

    H: int
    HV: int
    pool: str = "bfloat16"  # dtype of pool and snapshots
    raw_gates: bool = True  # takes a, b, A_log, dt_bias; else g, beta
    gate_dtype: str = "bfloat16"  # of a and b, or of g and beta
    bias_dtype: str = "float32"  # of dt_bias
    l2norm: bool = True
    commit: bool = False
    blocks: bool = False  # a request may have more than 16 tokens
    norms_given: bool = False  # takes q_inv_norm, k_inv_norm after g, beta; only with l2norm, without raw_gates
    K: int = 128
    V: int = 128
    BV: int = 32  # four warps of 8 rows
    threads: int = 128
    head_batch: int = 1  # value heads of one key head that share a CTA: 1, 2 or 4
    direct_up_to: int = 2048  # CTAs: smaller grids store states from registers, larger ones by bulk copies
    blocks_per_sm: int = 4
    paged: ClassVar[bool] = False  # states after tokens go to slots of the pool, not to rows of a buffer


@dataclasses.dataclass(frozen=True)
class PagedConfig(Config):
    """Of the chunk program whose states go back into the pool; raw gates, at most 16 tokens a request."""

    paged: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Of the recurrent program, which takes the same arguments; any number of tokens."""

    H: int
    HV: int
    pool: str = "bfloat16"
    raw_gates: bool = True
    gate_dtype: str = "bfloat16"
    bias_dtype: str = "float32"
    l2norm: bool = True
    commit: bool = False
    K: int = 128
    V: int = 128
    BV: int = 32
    threads: int = 128
    lanes: int = 8  # that share a state row: 4, 8 or 16
    blocks_per_sm: int = 5  # caps registers at 96

    @property
    def rows(self) -> int:
        """State rows that a lane holds a part of."""
        return self.BV * self.lanes // self.threads


@dataclasses.dataclass(frozen=True)
class ShortConfig:
    """Of the program for short requests, which takes the same arguments; it computes the first `tokens` of each."""

    H: int
    HV: int
    pool: str = "bfloat16"
    raw_gates: bool = True
    gate_dtype: str = "bfloat16"
    bias_dtype: str = "float32"
    l2norm: bool = True
    commit: bool = False
    K: int = 128
    V: int = 128
    tokens: int = 2  # loaded at once
    lossless: bool = False
    lanes: int = 8  # that share a state row: 4, 8 or 16
    rows: int = 4  # of the state that a lane holds a part of
    few_rows: int = 2  # the same while requests are few
    few_up_to: int = 2048  # warps of `few_rows`
    threads: int = 32
    blocks_per_sm: int = 16  # caps registers at 128
