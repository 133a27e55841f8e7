"""vLLM's own loader, registry and layer on the CPU: python -m tests.integration.vllm.real_layer VLLM ENTRY_POINTS

Both are folders for the path. Real are the modules in REAL; every other module of vLLM is a stand-in, and so is what is
not installed. Prints a JSON object of what was seen, which test_plugin.py judges.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
REAL = (
    "vllm.envs",
    "vllm.plugins",
    "vllm.model_executor.custom_op",
    "vllm.model_executor.layers.mamba.gdn.base",
    LAYER,
)
ABSENT = ("einops", "transformers", "aiter")  # not needed, so not imported either


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if name in REAL or (top != "vllm" and top not in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Module(spec.name)
        relative = spec.name.replace(".", "/")
        module.__path__ = [f"{sys.argv[1]}/{relative}"]  # real modules below it are found there
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = SPECIAL[name]() if name in SPECIAL else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Metadata(types.SimpleNamespace):
    """GDNAttentionMetadata: all of its fields that are not given are None, its counts 0."""

    def __getattr__(self, name: str) -> Any:
        return 0 if name.startswith("num_") and name != "num_accepted_tokens" else None


def platform() -> MagicMock:
    answers = ("is_rocm", "is_xpu", "is_cpu", "is_cuda_alike")
    return MagicMock(**{f"{name}.return_value": False for name in answers})


stock_calls: list[str] = []


def stock(name: str) -> Any:
    def call(**arguments: Any) -> tuple[Tensor, Any]:
        stock_calls.append(name)
        like = arguments["v"] if "v" in arguments else arguments["out"]
        return torch.zeros_like(like), arguments["initial_state"]

    return call


SPECIAL: dict[str, Any] = {
    "rocm_aiter_ops": lambda: MagicMock(
        **{f"{name}_gdn_triton_kernels_available.return_value": False for name in ("are", "is_rdna")}
    ),
    "current_platform": platform,
    "MambaBase": lambda: type("MambaBase", (), {}),
    "GDNAttentionMetadata": lambda: Metadata,
    "eager_break_during_capture": lambda: lambda function: function,
    "init_logger": lambda: logging.getLogger,
    "is_conv_state_dim_first": lambda: lambda: True,
    "causal_conv1d_update": lambda: lambda x, *_, **__: x,
    **{
        name: (lambda name=name: stock(name))
        for name in ("fused_sigmoid_gating_delta_rule_update", "fused_recurrent_gated_delta_rule_packed_decode")
    },
}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def build(module: Any, case: Any) -> Any:
    """A layer of the case's shapes as the model makes it, without the weights of its projections."""
    cls = module.QwenGatedDeltaNetAttention
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    x = case.arguments
    (_, _, H, K), (_, _, HV, V) = x["k"].shape, x["v"].shape
    layer.__dict__ |= {
        "prefix": "gdn", "tp_size": 1, "key_dim": H * K, "value_dim": HV * V, "head_k_dim": K, "head_v_dim": V,
        "num_k_heads": H, "num_v_heads": HV, "activation": "silu", "enable_packed_recurrent_decode": True,
        "gdn_decode_kernel": "cuda", "A_log": x["A_log"], "dt_bias": x["dt_bias"],
        "kv_cache": (torch.zeros(1), x["initial_state"]), "conv1d": MagicMock(),
    }  # fmt: skip
    return layer


def core(module: Any, case: Any) -> tuple[list[bool], Tensor]:
    """The real `_forward_core` on a verify, or on a decode for one-dimensional indices."""
    x, layer = case.arguments, build(module, case)
    N, NT = len(case.lengths), x["v"].shape[1]
    if "num_accepted_tokens" in x:
        metadata = Metadata(
            num_actual_tokens=NT, num_spec_decodes=N, spec_sequence_masks=torch.ones(N, dtype=torch.bool),
            spec_query_start_loc=x["cu_seqlens"], spec_state_indices_tensor=x["ssm_state_indices"],
            num_accepted_tokens=x["num_accepted_tokens"],
        )  # fmt: skip
    else:
        metadata = Metadata(
            num_actual_tokens=NT, num_decodes=N, num_decode_tokens=N, non_spec_query_start_loc=x["cu_seqlens"],
            non_spec_state_indices_tensor=x["ssm_state_indices"],
        )  # fmt: skip
    module.get_forward_context.return_value.attn_metadata = {"gdn": metadata}
    mixed = torch.cat([x[name][0].flatten(1) for name in ("q", "k", "v")], dim=1)
    o = torch.full(x["v"].shape[1:], float("nan"), dtype=torch.bfloat16)
    layer._forward_core(mixed_qkv=mixed, b=x["b"], a=x["a"], core_attn_out=o)
    stock_choice = module.QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode(layer, metadata)
    return [bool(stock_choice), layer._can_use_fused_gdn_mtp_decode(metadata)], o[None]


def main() -> None:
    sys.path[:0] = sys.argv[1:3]
    sys.meta_path.insert(0, StandIn())
    from tests.integration.vllm.cases import compare, expected, make

    heard = Lines()
    logger = logging.getLogger("hopper_gdn")
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    plugins: Any = importlib.import_module("vllm.plugins")
    custom_op: Any = importlib.import_module("vllm.model_executor.custom_op")
    module: Any = importlib.import_module(LAYER)
    seen: dict[str, Any] = {"found": sorted(plugins.load_plugins_by_group("vllm.general_plugins"))}
    verify, decode = "fused_sigmoid_gating_delta_rule_update", "fused_recurrent_gated_delta_rule_packed_decode"
    before = [getattr(module, name) for name in (verify, decode)]

    os.environ.pop("HOPPER_GDN_VLLM", None)
    plugins.load_general_plugins()
    seen["off"] = not custom_op.op_registry_oot and [getattr(module, name) for name in (verify, decode)] == before
    seen["off lines"] = list(heard.lines)

    module.supports_fused_mtp_decode = lambda: True
    os.environ["HOPPER_GDN_VLLM"] = "1"
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    seen["kept"] = [len(custom_op.op_registry_oot), [getattr(module, name).hopper_gdn for name in (verify, decode)]]

    os.environ["HOPPER_GDN_VLLM"] = "unfused"
    for _ in range(2):  # as in two processes, or in one that is told twice
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
    first = make([3, 3], [2, 3], 3)
    layer = build(module, first)
    seen["registered"] = list(custom_op.op_registry_oot)
    seen["class"], seen["is stock too"] = type(layer).__name__, isinstance(layer, module.QwenGatedDeltaNetAttention)
    seen["names"] = [getattr(getattr(module, name), "hopper_gdn", False) for name in (verify, decode)]
    for name, case in {"verify": first, "decode": make([1, 1, 1], None, padded=(1,))}.items():
        want, states = expected(case), case.pool.clone()
        fused, o = core(module, case)
        seen[name] = vars(compare(case, o, *want, states)) | {"fused": fused, "stock calls": list(stock_calls)}
    seen["lines"] = list(heard.lines)

    heard.lines.clear()
    for _ in range(3):  # more columns than are served
        core(module, make([17], [1], 17))
    seen["unsupported"] = {"stock calls": list(stock_calls), "lines": list(heard.lines)}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
