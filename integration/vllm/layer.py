"""The seams of vLLM 0.33's `QwenGatedDeltaNetAttention`: two names in its module, and one method of the class.

The core of that layer is one method from the convolution to the merged output, prefill in its middle. To override it
would be to copy it; what it calls for decode and verify are two functions by names of its module, so those are replaced
(`install`), and the convolution, prefill and the order of tokens stay stock. Only where vLLM's CUDA op does convolution
to norm of a verify at once are they not called. Where that is unwanted, vLLM's registry gets a subclass in the layer's
place, which turns that op off on a Hopper GPU and nothing else.

A call that cannot be served goes to the stock function with the same arguments: whatever ours refuses, it refuses
before anything is launched or written.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from integration.vllm.paged import packed_decode, paged_update

MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
LAYER = "QwenGatedDeltaNetAttention"
#: names in MODULE -> what runs in their place
OURS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "fused_sigmoid_gating_delta_rule_update": paged_update,
    "fused_recurrent_gated_delta_rule_packed_decode": packed_decode,
}
#: what a call may be refused with; anything else is an error of ours and must be seen
REFUSALS = (NotImplementedError, TypeError, ValueError)

logger = logging.getLogger("hopper_gdn")


@functools.cache
def say(text: str) -> None:
    """One line in a process, however many layers and calls have the same to say."""
    logger.info("vLLM: %s", text)


def stock_module() -> Any:
    """The module of the layer. Raises what its import raises, and AttributeError where a seam is not there."""
    module = importlib.import_module(MODULE)
    for name in (*OURS, LAYER):
        getattr(module, name)
    getattr(getattr(module, LAYER), "_can_use_fused_gdn_mtp_decode")  # noqa: B009 (a seam, not a value)
    return module


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether the programs run there, or the reference does (a CPU)."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0))


def routed(name: str, ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` with `stock` behind it for what cannot be served. Both take the same keyword arguments."""

    @functools.wraps(stock)
    def call(**arguments: Any) -> Any:
        pool = arguments["initial_state"]
        if not hopper(pool.device):
            say(f"{name} runs the stock path: {pool.device} is not a Hopper GPU")
            return stock(**arguments)
        try:
            result = ours(**arguments)
        except REFUSALS as error:
            say(f"{name} runs the stock path: {error}")
            return stock(**arguments)
        say(f"{name} runs hopper-gdn, {pool.dtype} states")
        return result

    call.hopper_gdn = True  # type: ignore[attr-defined]
    return call


def layer_class(stock: type) -> type:
    """The layer as a subclass of the stock one, under the same name for vLLM's registry."""

    class HopperGatedDeltaNetAttention(stock):
        """Stock but for one choice: a verify goes through the functions of the module, which are ours."""

        def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
            if not super()._can_use_fused_gdn_mtp_decode(attn_metadata):
                return False
            if hopper(self.kv_cache[1].device):  # all that the op takes, the functions take
                return False
            say("verify runs vLLM's fused op: not a Hopper GPU")
            return True

    return HopperGatedDeltaNetAttention


def install(module: Any, unfused: bool) -> None:
    """Put ours into the module of the layer and, if `unfused`, the subclass into vLLM's registry, once."""
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    present = custom_op.op_registry_oot.get(LAYER)
    if present is not None and present.__name__ != "HopperGatedDeltaNetAttention":
        logger.warning("vLLM: stock GDN layers, another plugin has replaced %s", LAYER)
        return
    if unfused and present is None:
        custom_op.PluggableLayer.register_oot(layer_class(getattr(module, LAYER)), name=LAYER)
    for name, ours in OURS.items():
        if not hasattr(stock := getattr(module, name), "hopper_gdn"):
            setattr(module, name, routed(name, ours, stock))
    say(
        f"{LAYER}: decode and verify run hopper-gdn where it serves them, {'not' if unfused else 'behind'} the fused op"
    )
