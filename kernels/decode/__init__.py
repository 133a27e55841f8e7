"""Decode: one token per request on a paged V-major pool, or any tokens on dense states."""

from kernels.decode.api import (
    fused_recurrent_gdr_decode_fwd,
    packed_recurrent_gated_delta_rule_decode,
    recurrent_gated_delta_rule_decode,
)
from kernels.decode.dense import fused_recurrent_gdr_fwd, recurrent_gated_delta_rule

__all__ = [
    "fused_recurrent_gdr_decode_fwd",
    "fused_recurrent_gdr_fwd",
    "packed_recurrent_gated_delta_rule_decode",
    "recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule_decode",
]
