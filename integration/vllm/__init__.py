"""vLLM: decode and speculative verify of its Qwen3-Next and Qwen3.5 layers, as a plugin that is off until asked for.

vLLM calls `register` in each of its processes, through the entry point `hopper_gdn` of `vllm.general_plugins`. Without
HOPPER_GDN_VLLM=1 in the environment that changes nothing.
"""

from __future__ import annotations

import logging
import os

SWITCH = "HOPPER_GDN_VLLM"
logger = logging.getLogger("hopper_gdn")


def register() -> None:
    """Replace the layer, if HOPPER_GDN_VLLM is 1 now. Once is enough; again is harmless.

    Raises:
        integration.environment.Shadowed: `kernels.verify` cannot be imported. Nothing was replaced. vLLM lets it
            through, and does not start.
    """
    if os.environ.get(SWITCH, "0") != "1":
        return
    from integration import environment

    environment.check()
    from integration.vllm import layer

    try:
        module = layer.stock_module()
    except Exception as error:
        logger.warning("vLLM: stock GDN layers, its layer cannot be imported as in 0.33: %s", error)
        return
    layer.install(module)
