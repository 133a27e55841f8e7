"""What the programs of replay are built from; importing it needs no compiler, so that CPU tensors need none either."""

from __future__ import annotations

import dataclasses

#: state rows of a mark that a fold was carried out: those of a piece of work while requests are few
MARKED = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """Static configuration. N, tokens, pool size, pitches and scales are run-time arguments."""

    H: int
    HV: int
    pool: str = "bfloat16"
    gate_dtype: str = "bfloat16"  # of a and b
    bias_dtype: str = "float32"  # of dt_bias
    l2norm: bool = True
    K: int = 128
    V: int = 128
    tiles: int = 4  # of 8 state rows that a warp owns
    few_tiles: int = 1  # the same while requests are few
    ctas: int = 396  # at most, as many as an H200 runs at once; each goes through several pieces of work
    threads: int = 128
    blocks_per_sm: int = 3  # caps registers at 168
    early_up_to: int = 132  # CTAs: with one on every SM of an H200 at most, the next launch starts beside them

    @property
    def warps(self) -> int:
        return self.threads // 32


@dataclasses.dataclass(frozen=True)
class FoldConfig(Config):
    """Of the program that applies accepted tokens to the pool."""

    ctas: int = 264
    blocks_per_sm: int = 2
    parts: int = 2  # bf16 parts of W, P and Z: 16 bits, or 24 where the pool keeps as many


@dataclasses.dataclass(frozen=True)
class WindowConfig(FoldConfig):
    """Of the program that verifies behind a ring of accepted tokens."""

    marked: int = MARKED

    @property
    def requests(self) -> int:
        """That share a block of CTAs: so many that none has more than 128 pieces, and at most 1024."""
        return min(1024, 128 * self.ctas // (self.HV * self.V // (self.warps * 8 * self.tiles)))


@dataclasses.dataclass(frozen=True)
class CursorConfig:
    """Of the program that moves the cursors of a ring."""

    threads: int = 128
