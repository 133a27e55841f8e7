"""SGLang's GDN kernel class with decode and verify replaced. Imports SGLang: only the hook imports this module."""

from __future__ import annotations

import logging
import re
from typing import Any

from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from torch import Tensor

from integration.sglang import tape
from kernels.decode.api import packed_recurrent_gated_delta_rule_decode, recurrent_gated_delta_rule_decode
from kernels.verify.api import recurrent_gated_delta_rule_verify

_logger = logging.getLogger("hopper_gdn")
#: what the public functions raise before anything was launched or written
REFUSALS = (TypeError, ValueError, NotImplementedError)
_said: set[str] = set()


def stock(call: str, reason: str) -> None:
    """Log that the stock kernel runs, once per call and reason; numbers in it make no other reason."""
    key = f"{call}: {re.sub(r'[0-9]+', '', reason)}"
    if key not in _said:
        _said.add(key)
        _logger.warning("SGLang: GDN %s runs the stock Triton kernel: %s", call, reason)


class HopperGDNKernel(TritonGDNKernel):
    """Decode, packed decode and linear-chain verify by the kernels; extend is inherited.

    The stock method runs where the public function refuses a call: trees, dtypes and shapes it is not built for.
    """

    supports_packed_decode = True
    supports_strided_target_verify_qkv = True

    def packed_decode(self, mixed_qkv: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """mixed_qkv: [B, 2 H K + HV V]; a, b: [B, HV] -> [1, B, HV, V]. The pool is updated in place."""
        try:
            if any(name.startswith("replayssm") and value is not None for name, value in given.items()):
                raise ValueError("ReplaySSM keeps its own ring")
            heads = (given["num_v_heads"], given["head_v_dim"])
            if tuple(given["ssm_states"].shape[1:3]) != heads:
                raise ValueError(f"the pool has shape {tuple(given['ssm_states'].shape)}, the layer heads {heads}")
            return packed_recurrent_gated_delta_rule_decode(
                mixed_qkv, a, b, given["A_log"], given["dt_bias"], given["ssm_states"], given["cache_indices"],
                scale=given["scale"],
            )  # fmt: skip
        except REFUSALS as reason:
            stock("packed decode", str(reason))
        result: Tensor = super().packed_decode(mixed_qkv, a, b, **given)
        return result

    def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any) -> Tensor:
        """q, k: [1, B, H, K]; v: [1, B, HV, V]; a, b: [B, HV] -> [1, B, HV, V]. The pool is updated in place."""
        try:
            return recurrent_gated_delta_rule_decode(
                given["A_log"], a, given["dt_bias"], q, k, v, b, given["ssm_states"], given["cache_indices"]
            )
        except REFUSALS as reason:
            stock("decode", str(reason))
        result: Tensor = super().decode(q, k, v, a, b, **given)
        return result

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any
    ) -> Tensor:
        """q, k: [1, N T, H, K]; v: [1, N T, HV, V]; a, b: [N T, HV] -> like v. Every step's state is kept.

        Where the pool has a tape in place of snapshots, the tokens are kept.
        """
        starts, kept = given["query_start_loc"], given["intermediate_states_buffer"]
        if isinstance(kept, tape.Layer):
            return kept.verify(A_log, dt_bias, q, k, v, a, b, **given)
        try:
            return recurrent_gated_delta_rule_verify(
                A_log, a, dt_bias, q, k, v, b, given["ssm_states"],
                given["cache_indices"][: starts.shape[0] - 1],  # SGLang's may be longer than the batch
                starts, kept, given["intermediate_state_indices"],
                cache_steps=given["cache_steps"], retrieve_parent_token=given.get("retrieve_parent_token"),
            )  # fmt: skip
        except REFUSALS as reason:
            stock("verify", str(reason))
        result: Tensor = super().target_verify(A_log, dt_bias, q, k, v, a, b, **given)
        return result
