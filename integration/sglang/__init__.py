"""SGLang plugin: GDN decode and linear-chain verify by the kernels, everything else as SGLang has it.

SGLang loads the entry point `hopper_gdn` of the group `sglang.srt.plugins` in every one of its processes and calls
`register`. That changes nothing yet: each GDN backend, when it is built, asks whether the kernels were chosen, by
`--linear-attn-decode-backend hopper_gdn` or by the environment variable HOPPER_GDN_SGLANG=1. With
HOPPER_GDN_SGLANG=replay they are chosen too, and verify keeps tokens instead of states (`integration.sglang.tape`).
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from integration import environment

CHOICE = "hopper_gdn"
VARIABLE = "HOPPER_GDN_SGLANG"
DISPATCHER = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__"

_logger = logging.getLogger("hopper_gdn")


def register() -> None:
    """Add the choice `hopper_gdn` and hook the dispatcher of GDN kernels; for replay also the pool and the commit.

    Raises:
        environment.Shadowed: `kernels` is another distribution's package; the message says what to do.
        ValueError: HOPPER_GDN_SGLANG has a value without a meaning.
        ImportError: SGLang is not installed.
    """
    environment.check()
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    if CHOICE not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([CHOICE])
    hooks.HookRegistry.register(DISPATCHER, build_dispatcher, hooks.HookType.AROUND)
    if variable() == "replay":
        importlib.import_module("integration.sglang.tape").install()


def by_flag() -> bool:
    """Whether the server arguments name our choice for decode. SGLang's enumeration has only CUSTOM for all such."""
    mamba = importlib.import_module("sglang.srt.runtime_context").get_exec().mamba
    return CHOICE in (mamba.linear_attn_decode_backend, mamba.linear_attn_backend)


def variable() -> str:
    """What HOPPER_GDN_SGLANG says: "0", "1" or "replay". Raises ValueError for anything else."""
    value = os.environ.get(VARIABLE, "") or "0"
    if value not in ("0", "1", "replay"):
        raise ValueError(f"{VARIABLE} is {value!r}, must be 0, 1 or replay")
    return value


def build_dispatcher(
    original: Any, dispatcher: Any, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None
) -> None:
    """Around GDNKernelDispatcher.__init__: build the stock one, then put our kernel where it serves."""
    flag = decode_backend.is_custom() and by_flag()
    if not flag and variable() == "0":
        original(dispatcher, decode_backend, prefill_backend, verify_backend)
        return
    if flag:  # the stock dispatcher validates what remains, and does not know CUSTOM
        triton = type(decode_backend)("triton")
        decode_backend, prefill_backend, verify_backend = (
            triton if backend is not None and backend.is_custom() else backend
            for backend in (decode_backend, prefill_backend, verify_backend)
        )
    original(dispatcher, decode_backend, prefill_backend, verify_backend)
    kernel = importlib.import_module("integration.sglang.kernel").HopperGDNKernel()
    dispatcher.decode_kernel = dispatcher.verify_kernel = kernel
    dispatcher.supports_packed_decode = True
    dispatcher.verify_kernel_is_flashinfer = False
    _logger.info(
        "SGLang: GDN decode and verify run the kernels of hopper-gdn, chosen by %s; extend and trees stay as they were",
        "--linear-attn-decode-backend" if flag else VARIABLE,
    )
