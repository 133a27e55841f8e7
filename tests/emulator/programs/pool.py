"""Reads and writes slots of a pool whose element offsets pass 2^31."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    slot_size: int = 1 << 16
    used: int = 256  # leading elements of a slot that are touched
    threads: int = 64


def build(config: Config) -> Any:
    SIZE, USED = config.slot_size, config.used
    N, SLOTS = T.dynamic("N"), T.dynamic("SLOTS")

    @T.prim_func
    def pool(data: T.Tensor((SLOTS, SIZE), "int8"), slots: T.Tensor((N,), "int32"), seen: T.Tensor((N, USED), "int8")):
        with T.Kernel(N, threads=config.threads) as n:
            for j in T.Parallel(USED):
                seen[n, j] = data[slots[n], j]
                data[slots[n], j] = T.int8(7)

    return pool
