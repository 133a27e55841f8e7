"""What the dense program is built from; importing it needs no compiler, so that CPU tensors need none either."""

from __future__ import annotations

import dataclasses
from typing import Literal

#: which tokens belong to a request: all T of its batch row, the first seqlens[n] of them, or cu_seqlens of packed ones
Lengths = Literal["all", "seqlens", "cu_seqlens"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration. Requests, tokens, pitches and the scale are run-time arguments."""

    H: int
    HV: int
    dtype: str = "bfloat16"  # of q, k, v and o
    l2norm: bool = False
    has_initial: bool = True
    stores_final: bool = True
    lengths: Lengths = "all"
    index: str = "int32"  # dtype of seqlens or cu_seqlens
    v_first: bool = False  # states are [V, K], else [K, V]
    K: int = 128
    V: int = 128
    BV: int = 16  # state columns of a warp: 8 or 16
    few_BV: int = 8  # the same while requests are few
    few_up_to: int = 2048  # warps of `few_BV`
    warps: int = 4  # of a CTA; head_batch divides them
    head_batch: int = 1  # value heads of one key head that share a CTA: 1, 2 or 4
    blocks_per_sm: int = 4  # at least as many fit: caps registers

    @property
    def groups(self) -> int:
        """Lanes of a warp that share a state column, and hold K / groups of its rows each; a lane has 4 columns."""
        return 32 * 4 // self.BV

    @property
    def rows(self) -> int:
        """State rows that a lane holds a part of."""
        return self.K // self.groups

    @property
    def tiles(self) -> int:
        """CTAs of a value head."""
        return self.V * self.head_batch // (self.BV * self.warps)
