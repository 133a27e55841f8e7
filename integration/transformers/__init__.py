"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE of Hugging Face transformers (5.17 to 5.24) on `kernels.decode`.

The layers look the two functions of `NAMES` up in their module when they run, so that models made before `patch()` use
the patched ones too.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from integration import environment

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
RECURRENT, CHUNK = NAMES = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
LONGEST = 64  # tokens of a prefill that run one after another; the stock function takes 64 in one product

log = logging.getLogger("hopper_gdn")
_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, what was there, ours
_said: set[str] = set()


class Patched:
    """What `patch()` returns: leaving it as a context calls `unpatch()`."""

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unpatch()


def modules() -> list[ModuleType]:
    """The modules of the supported models that this transformers has.

    Raises ImportError if there is none, or one without the functions.
    """
    found = []
    for name in MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(f"transformers.models.{name}"):
                raise
            continue
        if missing := [function for function in NAMES if not hasattr(module, function)]:
            raise ImportError(f"{module.__name__} has no {missing[0]}; transformers 5.17 to 5.24 are supported")
        found.append(module)
    if not found:
        raise ImportError(f"this transformers has none of {', '.join(MODELS)}; install 5.17 to 5.24")
    return found


def patch() -> Patched:
    """Serve the gated delta rule of every supported model. Process-wide; calls nest and are undone by `unpatch()`.

    Not meant to run while another thread is inside a forward pass: that one may see both functions.

    Raises Shadowed (an ImportError) if `kernels` is another distribution's package, ImportError for a transformers
    without these functions.
    """
    global _depth
    environment.check()
    with _lock:
        if not _depth:
            for module in modules():
                for name in NAMES:
                    stock = getattr(module, name)
                    ours = served(stock, name)
                    _replaced.append((module, name, stock, ours))
            for module, name, _, ours in _replaced:
                setattr(module, name, ours)
        _depth += 1
    return Patched()


def unpatch() -> None:
    """Undo one `patch()`; the last one puts back what was there. Raises RuntimeError if nothing is patched."""
    global _depth
    with _lock:
        if not _depth:
            raise RuntimeError("unpatch() without a patch()")
        _depth -= 1
        if _depth:
            return
        for module, name, stock, ours in _replaced:
            if getattr(module, name, None) is ours:
                setattr(module, name, stock)
            else:
                say(f"{module.__name__}.{name} was replaced after patch(): left as it is")
        _replaced.clear()
        _said.clear()


def say(text: str) -> None:
    """One line of the log for each text, whatever numbers it holds."""
    key = re.sub(r"[\d(), ]+", " ", text)
    if key not in _said:
        _said.add(key)
        log.info(text)


def served(stock: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function that stands in for `stock`: q, k [B, T, H or HV, K], v [B, T, HV, V], g and beta [B, T, HV], states
    [B, HV, K, V] in fp32. What cannot be served runs `stock` with the arguments as they came."""

    def gated_delta_rule(
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        *args: Any,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        import torch

        from kernels.decode import recurrent_gated_delta_rule

        def run_stock(reason: str) -> Any:
            say(f"transformers: {name} runs the stock function: {reason}")
            return stock(
                query, key, value, g, beta, *args, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
            )  # fmt: skip

        if args:
            return run_stock("positional options")
        given = [x for x in (query, key, value, g, beta, initial_state) if x is not None]
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            return run_stock("a gradient is asked for, the kernels have none")
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            return run_stock("packed sequences")
        if any(x.dtype == torch.float64 for x in given):
            return run_stock("fp64 inputs, which it computes in fp32")
        if query.shape[1] > LONGEST:
            return run_stock(f"more than {LONGEST} tokens, which a recurrent kernel takes one by one")
        # A convolution leaves the channels strided for more than one token; the kernels want them side by side.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        try:
            result = recurrent_gated_delta_rule(
                q, k, v, g.float(), beta.float(), initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            return run_stock(str(error))
        say(f"transformers: {name} runs kernels.decode.recurrent_gated_delta_rule on {query.device.type} tensors")
        return result

    return gated_delta_rule
