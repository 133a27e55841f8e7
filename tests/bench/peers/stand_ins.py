"""What the peers' unpacked files import from the rest of their packages, answered for the device that is here.

A stand-in may not change what a kernel computes or how it is launched: each one tells the truth about the device, as
the function it stands for does.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch


def is_cuda() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


def device_sm(device: int | None = None) -> int:
    """Compute capability as an integer, 90 for SM90; 0 without a GPU."""
    if not is_cuda():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_sm90_supported() -> bool:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return device_sm() // 10 == 9 and version >= (12, 3)


def _core_count(device: int = 0) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda() else 0


def _sglang() -> dict[str, dict[str, Any]]:
    release = importlib.import_module("packaging.version").parse(torch.__version__).release
    return {
        "sglang.srt": {},
        "sglang.srt.utils": {
            "get_device_sm": device_sm,
            "is_cuda": is_cuda,
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: torch.version.hip is not None,
            "is_sm90_supported": is_sm90_supported,
        },
        "sglang.srt.utils.common": {"torch_release": release, "get_device_core_count": _core_count},
        "sglang.kernels.jit": {},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: device_sm() >= 90},
    }


def _vllm() -> dict[str, dict[str, Any]]:
    platform = types.SimpleNamespace(
        is_cuda=is_cuda,
        is_cuda_alike=lambda: is_cuda() or torch.version.hip is not None,
        is_device_capability_family=lambda family, device_id=0: device_sm(device_id) // 10 == family // 10,
    )
    return {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {
            "triton": importlib.import_module("triton"),
            "tl": importlib.import_module("triton.language"),
            "tldevice": importlib.import_module("triton.language.extra.libdevice"),
        },
    }


def of(peer: str) -> dict[str, dict[str, Any]]:
    """Stand-in modules of a peer: name -> attributes. Parents come before their children."""
    return {"sglang": _sglang, "vllm": _vllm}.get(peer, dict)()
