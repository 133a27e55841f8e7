"""Every block writes its number: to a place of its own, or (wrongly) all to the same place."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    conflict: bool = False
    blocks: int = 4
    threads: int = 32


def build(config: Config) -> Any:
    B, C = config.blocks, config.threads

    @T.prim_func
    def blocks(y: T.Tensor((B, C), "int32")):
        with T.Kernel(B, threads=config.threads) as b:
            for j in T.Parallel(C):
                y[0 if config.conflict else b, j] = b

    return blocks
