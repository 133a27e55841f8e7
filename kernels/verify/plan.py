"""Which program computes a verify, from shapes and dtypes alone.

Nothing here reads a tensor, a device or the environment.
"""

from __future__ import annotations

import functools
from typing import Any

from kernels.runtime import Program
from kernels.tile import TM
from kernels.verify.config import Config, PagedConfig, RecurrentConfig, ShortConfig

#: tokens of the longest request that the program for short requests takes
SHORT = 2


@functools.cache
def plan(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    pool: str,
    raw_gates: bool,
    gate_dtype: str,
    bias_dtype: str,
    l2norm: bool,
    commit: bool,
    max_tokens: int,
    lossless: bool = False,
    norms_given: bool = False,
    head_batch: int = 1,
) -> Program:
    """The program for these static facts. `max_tokens` bounds the tokens of any one request.

    `head_batch` is the caller's choice: two value heads a CTA are faster at large N only, and N must not matter here.

    N, the pool size and all pitches are run-time arguments of every program: they never cause a compilation.
    """
    shared: dict[str, Any] = {
        "H": H, "HV": HV, "K": K, "V": V, "pool": pool, "raw_gates": raw_gates, "gate_dtype": gate_dtype,
        "bias_dtype": bias_dtype, "l2norm": l2norm, "commit": commit,
    }  # fmt: skip
    if max_tokens <= SHORT and head_batch == 1 and not norms_given:
        # Products of 16 token rows do not pay for so few tokens.
        return Program("kernels.verify.short", _short(shared, max(max_tokens, 1), lossless))
    if lossless:  # rounding after every token makes the tokens a sequence: no chunk form has these bits
        return Program("kernels.verify.recurrent", RecurrentConfig(**shared))
    # One block is one row tile of the tensor cores; only longer requests pay for carrying the fp32 state over.
    blocks = max_tokens > TM
    config = Config(
        **shared,
        blocks=blocks,
        norms_given=norms_given,
        head_batch=head_batch,
        # Registers for what is carried; 4 CTAs beat 3 and 5 without it, at every N (specs/design/tuning.md).
        blocks_per_sm=3 if blocks else 4,
    )
    return Program("kernels.verify.chunk", config)


@functools.cache
def paged_plan(
    *, H: int, HV: int, K: int, V: int, pool: str, gate_dtype: str, bias_dtype: str, l2norm: bool
) -> Program:
    """The program of a verify whose states go to slots of the pool: one, for any number of tokens up to 16."""
    config = PagedConfig(H=H, HV=HV, K=K, V=V, pool=pool, gate_dtype=gate_dtype, bias_dtype=bias_dtype, l2norm=l2norm)
    return Program("kernels.verify.paged", config)


def _short(shared: dict[str, Any], tokens: int, lossless: bool) -> ShortConfig:
    """Two tokens of a 16-bit pool cost registers: 168 instead of 128. Measured: specs/design/decode.md."""
    tile: dict[str, Any] = {}
    if shared["pool"] == "float32":  # half the rows are as many bytes
        tile = {"rows": 2, "few_rows": 1}
    elif tokens == 2:
        tile = {"blocks_per_sm": 12, "few_up_to": 512}
    return ShortConfig(**shared, tokens=tokens, lossless=lossless, **tile)
