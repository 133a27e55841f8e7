"""x rounded to fp16 and bf16, and h widened to fp32."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tests.emulator.programs import PASS_CONFIGS

__all__ = ["PASS_CONFIGS", "Config", "build"]


@dataclass(frozen=True)
class Config:
    size: int = 1 << 16
    threads: int = 128


def build(config: Config) -> Any:
    SIZE = config.size

    @T.prim_func
    def casts(
        x: T.Tensor((SIZE,), "float32"),
        h: T.Tensor((SIZE,), "float16"),
        half: T.Tensor((SIZE,), "float16"),
        bf16: T.Tensor((SIZE,), "bfloat16"),
        wide: T.Tensor((SIZE,), "float32"),
    ):
        with T.Kernel(1, threads=config.threads):
            for i in T.Parallel(SIZE):
                half[i] = T.cast(x[i], "float16")
                bf16[i] = T.cast(x[i], "bfloat16")
                wide[i] = T.cast(h[i], "float32")

    return casts
