"""Recorded real inputs of the recurrence; capture_real_inputs.py makes them and says how."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RealInput:
    """A block of T tokens of one request in one layer, as the layer handed it to its recurrence."""

    name: str
    q: Tensor  # [T, H, K] bf16, after the convolution, before the norm
    k: Tensor  # [T, H, K] bf16
    v: Tensor  # [T, HV, V] bf16
    a: Tensor  # [T, HV] bf16, raw
    b: Tensor  # [T, HV] bf16, raw
    A_log: Tensor  # [HV] fp32
    dt_bias: Tensor  # [HV] bf16
    state: Tensor  # [HV, V, K] bf16, V-major: the state before the block
    g: Tensor  # [T, HV] fp32: the log decay the layer computed
    beta: Tensor  # [T, HV] bf16: the sigmoid the layer computed, in bf16
    o: Tensor  # [T, HV, V] bf16: what the layer's recurrence returned
    state_after: Tensor  # [HV, V, K] fp32: the state it returned
    facts: dict[str, Any]  # versions, configuration, seed


def load_real_inputs() -> list[RealInput]:
    """All recorded cases, in the order of their names. Raises FileNotFoundError if there are none."""
    paths = sorted(Path(__file__).parent.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no recorded inputs in {Path(__file__).parent}")
    return [_load(path) for path in paths]


def _load(path: Path) -> RealInput:
    with safe_open(path, framework="pt") as file:
        # a copy is aligned for 16-byte accesses, the mapped file is not
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        facts = json.loads(file.metadata()["facts"])
    return RealInput(name=path.stem, facts=facts, **tensors)
