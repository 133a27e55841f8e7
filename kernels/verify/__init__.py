"""Gated DeltaNet speculative verify over a paged V-major state pool.

`recurrent_gated_delta_rule_verify` is the drop-in public function; the two `fused_..._fwd` functions are the level
below it, where the caller owns every buffer. `paged_recurrent_gated_delta_rule_verify` keeps states in
slots of the pool.
"""

from typing import Any

from kernels.verify import hidden
from kernels.verify.api import (
    fused_recurrent_gdr_verify_fwd,
    fused_recurrent_gdr_verify_gated_fwd,
    gdn_sigmoid_gate,
    recurrent_gated_delta_rule_verify,
)
from kernels.verify.paged_api import paged_recurrent_gated_delta_rule_verify

__all__ = [
    "fused_recurrent_gdr_verify_fwd",
    "fused_recurrent_gdr_verify_gated_fwd",
    "gdn_sigmoid_gate",
    "paged_recurrent_gated_delta_rule_verify",
    "recurrent_gated_delta_rule_verify",
]


def __getattr__(name: str) -> Any:
    return hidden.attribute(name)
