"""Which programs an engine launches for a model: what `kernels.runtime.warmup` makes ready and the wheel carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels.runtime import Program

#: key heads, value heads of the Qwen3-Next and Qwen3.5 models, and over how many ranks they are served
MODELS = ((16, 32), (16, 48), (16, 64))
RANKS = (1, 2, 4, 8)
POOLS = ("bfloat16", "float32")

OPERATIONS = ("decode", "verify", "paged", "replay", "ring")


def programs(
    H: int,
    HV: int,
    *,
    K: int = 128,
    V: int = 128,
    pool: str = "bfloat16",
    gate_dtype: str = "bfloat16",
    bias_dtype: str = "bfloat16",
    operations: Sequence[str] = OPERATIONS,
) -> list[Program]:
    """The programs for these heads of one rank; dtypes as in configurations, gates raw, norms in the kernel.

    decode: in place, from q, k, v or from packed rows. verify: snapshots, up to 16 tokens. paged: states go to slots of
    the pool. replay: verify and commit. ring: verify behind a ring, which folds, and its cursors.
    Raises ValueError for an operation that is none of these.
    """
    unknown = sorted(set(operations) - set(OPERATIONS))
    if unknown:
        raise ValueError(f"operations is {tuple(operations)}, {unknown[0]!r} must be one of {OPERATIONS}")
    from kernels.decode.plan import plan as decode_plan
    from kernels.replay import plan as replay
    from kernels.tile import TM
    from kernels.verify.plan import SHORT, paged_plan
    from kernels.verify.plan import plan as verify_plan

    facts: dict[str, Any] = {
        "H": H, "HV": HV, "K": K, "V": V, "pool": pool, "gate_dtype": gate_dtype, "bias_dtype": bias_dtype,
        "l2norm": True,
    }  # fmt: skip
    found: list[Program] = []
    if "decode" in operations:
        found += [decode_plan(**facts, packed=packed, moves=False) for packed in (False, True)]
    if "verify" in operations:
        lengths = (*range(1, SHORT + 1), TM)
        found += [verify_plan(**facts, raw_gates=True, commit=False, max_tokens=tokens) for tokens in lengths]
    if "paged" in operations:
        found.append(paged_plan(**facts))
    if "replay" in operations:
        found += [replay.plan(**facts), replay.fold_plan(**facts)]
    if "ring" in operations:
        found += [replay.window_plan(**facts), replay.cursors_plan()]
    return found


def in_the_wheel() -> list[Program]:
    """What the wheel carries: every model, over every number of ranks, with the dtypes that SGLang and vLLM serve."""
    shards = [(H // ranks, HV // ranks) for H, HV in MODELS for ranks in RANKS]
    operations = [operation for operation in OPERATIONS if operation != "ring"]
    return [p for H, HV in shards for pool in POOLS for p in programs(H, HV, pool=pool, operations=operations)]
