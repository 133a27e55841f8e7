"""vLLM: decode and speculative verify of its Qwen3-Next and Qwen3.5 layers, as a plugin that is off until asked for.

vLLM calls `register` in each of its processes, through the entry point `hopper_gdn` of `vllm.general_plugins`. Without
HOPPER_GDN_VLLM in the environment that changes nothing. With 1 the two functions are replaced that vLLM calls where its
fused CUDA op does not serve; with `unfused` that op is turned off too, on a Hopper GPU.
"""

from __future__ import annotations

import logging
import os

SWITCH = "HOPPER_GDN_VLLM"
logger = logging.getLogger("hopper_gdn")


def register() -> None:
    """Do what HOPPER_GDN_VLLM says now. Once is enough; again is harmless.

    Raises:
        ValueError: it is neither 0, 1 nor unfused.
        integration.environment.Shadowed: `kernels.verify` cannot be imported. Nothing was replaced. vLLM lets it
            through, and does not start.
    """
    value = os.environ.get(SWITCH, "") or "0"
    if value not in ("0", "1", "unfused"):
        raise ValueError(f"{SWITCH} is {value!r}, must be 0, 1 or unfused")
    if value == "0":
        return
    from integration import environment

    environment.check()
    from integration.vllm import layer

    try:
        module = layer.stock_module()
    except Exception as error:
        logger.warning("vLLM: stock GDN layers, its layer cannot be imported as in 0.33: %s", error)
        return
    layer.install(module, unfused=value == "unfused")
