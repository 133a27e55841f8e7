"""The peers' released packages: which version, and the few files of it that the adapters run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
#: unpacked peers, ignored by git; `nox -s peers` fills it
FOLDER = ROOT / ".peers"
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Peer:
    """`name` labels rows and the folder below .peers; `modules` are imported, `files` are what they need of the wheel.

    A file that ends in "/" stands for everything below it.
    """

    name: str
    package: str
    version: str
    modules: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def top(self) -> str:
        return self.modules[0].partition(".")[0]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


_SGLANG = "sglang.kernels.ops"
_VLLM = "vllm.third_party.flash_linear_attention.ops"
_FLASHINFER = "flashinfer.gdn_kernels"


def _paths(*modules: str) -> tuple[str, ...]:
    return tuple(module.replace(".", "/") + ".py" for module in modules)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "sglang",
            "sglang",
            "0.5.23",
            modules=(
                f"{_SGLANG}.attention.linear.fused_sigmoid_gating_recurrent",
                f"{_SGLANG}.attention.fla.fused_recurrent",
                f"{_SGLANG}.mamba.mamba_state_scatter_triton",
            ),
            files=_paths(
                f"{_SGLANG}.attention.linear.fused_sigmoid_gating_recurrent",
                f"{_SGLANG}.attention.fla.fused_recurrent",
                f"{_SGLANG}.attention.fla.op",
                f"{_SGLANG}.attention.fla.utils",
                f"{_SGLANG}.mamba.mamba_state_scatter_triton",
                f"{_SGLANG}.memory.ptr_table",
            ),
        ),
        Peer(
            "vllm",
            "vllm",
            "0.33.0",
            modules=(f"{_VLLM}.fused_sigmoid_gating", f"{_VLLM}.fused_recurrent"),
            files=_paths(f"{_VLLM}.fused_sigmoid_gating", f"{_VLLM}.fused_recurrent", f"{_VLLM}.op", f"{_VLLM}.utils"),
        ),
        Peer(
            "fla",
            "fla-core",
            "0.6.0",
            modules=("fla.ops.gated_delta_rule.fused_recurrent",),
            files=(
                *_paths("fla.ops.gated_delta_rule.fused_recurrent", "fla.ops.utils.op", "fla.ops.utils.softplus"),
                "fla/utils/",
            ),
        ),
        Peer(
            "flashinfer",
            "flashinfer-python",
            "0.7.4",
            modules=(
                f"{_FLASHINFER}.gdn_decode_bf16_state",
                f"{_FLASHINFER}.gdn_decode_bf16_wy_output_only",
                f"{_FLASHINFER}.gdn_decode_bf16_wy_ucache_flush",
            ),
            files=_paths(
                f"{_FLASHINFER}.gdn_decode_bf16_state",
                f"{_FLASHINFER}.gdn_decode_bf16_wy_output_only",
                f"{_FLASHINFER}.gdn_decode_bf16_wy_ucache_flush",
                f"{_FLASHINFER}.device_target",
                f"{_FLASHINFER}.dtype_compat",
                f"{_FLASHINFER}._softplus",
                f"{_FLASHINFER}.cute_dsl_cache_naming",
            ),
        ),
    )
}


def manifest() -> dict[str, dict[str, Any]]:
    """What is unpacked: peer -> version, wheel, its sha256, files. Empty if nothing is."""
    path = FOLDER / MANIFEST
    return json.loads(path.read_text()) if path.exists() else {}
