"""Block b writes its number to row b % rows: to a place of its own, or (with fewer rows than blocks) not."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    blocks: int = 4
    rows: int = 4
    threads: int = 32


def build(config: Config) -> Any:
    R, C = config.rows, config.threads

    @T.prim_func
    def blocks(y: T.Tensor((R, C), "int32")):
        with T.Kernel(config.blocks, threads=config.threads) as b:
            for j in T.Parallel(C):
                y[b % R, j] = b

    return blocks
