"""What the tests of verify by replay run in a process of its own: SGLang's pool, dispatcher and commit, hooked.

Prints one JSON object. Arguments: a folder for the entry point, and which wrong adapter to be ("" for none).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import types
from typing import Any

import torch
from torch import Tensor

from kernels.verify import recurrent_gated_delta_rule_verify
from tests.integration.sglang import stubs
from tests.integration.sglang.driver import announce, relative

LAYERS, H, HV, K, V, STEPS, ROWS, SLOTS = 2, 2, 6, 32, 16, 5, 4, 12
CHANNELS = 2 * H * K + HV * V
ROUNDS = 8


def new_pool(memory: Any, dtype: torch.dtype, **other: Any) -> Any:
    mamba = importlib.import_module("sglang.srt.configs.mamba_utils")
    shape = mamba.Mamba2StateShape(
        conv=[(CHANNELS, 3)], temporal=(HV, V, K), intermediate_size=HV * V, conv_dim=CHANNELS, ssm_state_size=K,
        num_heads=HV, head_dim=V, state_size=K, conv_kernel=4, num_k_heads_per_tp=H,
    )  # fmt: skip
    params = mamba.Mamba2CacheParams(
        shape=shape, layers=[1, 3], dtype=mamba.Mamba2StateDType(conv=torch.bfloat16, temporal=dtype)
    )
    arguments = {"speculative_num_draft_tokens": STEPS, "speculative_eagle_topk": 1, "cache_params": params} | other
    return memory.MambaPool(
        size=SLOTS - 1, spec_state_size=ROWS, mamba_layer_ids=[1, 3], device="cpu", **arguments
    )  # fmt: skip


def truth(pool: Tensor, call: dict[str, Any], slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """What the path with snapshots gives: output, and the state after every token, before its scatter."""
    snapshots = pool.new_zeros(len(slots), STEPS, HV, V, K)
    rows = torch.arange(len(slots), dtype=torch.int32)
    out = recurrent_gated_delta_rule_verify(
        **call, ssm_states=pool, cache_indices=slots, query_start_loc=starts, intermediate_states_buffer=snapshots,
        intermediate_state_indices=rows,
    )  # fmt: skip
    return out, snapshots


def scattered(pool: Tensor, snapshots: Tensor, slots: Tensor, steps: Tensor) -> None:
    for n, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
        if slot >= 0 and step >= 0:
            pool[slot] = snapshots[n, step]


def rounds(memory: Any, dispatcher: Any, update: Any, dtype: torch.dtype, wrong: str) -> dict[str, float]:
    """Verify, accept and commit again and again on one pool; the stock path goes along from the same states."""
    pool = new_pool(memory, dtype)
    pool.mamba_cache.temporal.normal_()
    caches = pool.get_speculative_mamba2_params_all_layers()
    gates = [(torch.randn(HV), torch.randn(HV).bfloat16()) for _ in range(LAYERS)]
    worst = {"output": 0.0, "state": 0.0, "elsewhere": 0.0, "verify wrote": 0.0, "rejected": 0.0}
    for _ in range(ROUNDS):
        N = random.randint(1, ROWS)
        padded = N + 1  # one row behind them: no slot, no tokens, NaN
        picked = torch.randperm(SLOTS - 1)[: 2 * N] + 1
        slots, tracks = picked[:N].int(), picked[N:].long()
        indices = torch.cat((slots, torch.tensor([-1], dtype=torch.int32)))
        starts = (torch.arange(padded + 1) * STEPS).clamp(max=N * STEPS).int()
        accepted = torch.tensor([random.choice((-1, *range(STEPS), STEPS - 1)) for _ in range(N)])
        tracked = torch.tensor([random.randint(-1, int(step)) if step >= 0 else -1 for step in accepted])
        want = caches.temporal.clone()
        before = caches.temporal.clone()
        for i, (A_log, bias) in enumerate(gates):
            mixed = torch.randn(padded * STEPS, CHANNELS).bfloat16()
            a, b = torch.randn(2, padded * STEPS, HV).bfloat16()
            mixed[N * STEPS :] = float("nan")
            q, k, v = mixed.split([H * K, H * K, HV * V], -1)
            call = {
                "A_log": A_log, "dt_bias": bias, "q": q.view(1, -1, H, K), "k": k.view(1, -1, H, K),
                "v": v.view(1, -1, HV, V), "a": a, "b": b,
            }  # fmt: skip
            layer = pool.mamba2_layer_cache(i)
            out = dispatcher.target_verify(
                **call, ssm_states=layer.temporal, cache_indices=indices, query_start_loc=starts,
                intermediate_states_buffer=layer.intermediate_ssm,
                intermediate_state_indices=torch.arange(ROWS + 1, dtype=torch.int32), cache_steps=STEPS,
                retrieve_parent_token=None, stable_rows=False,
            )  # fmt: skip
            expected, snapshots = truth(before[i], call, indices, starts)
            worst["output"] = max(worst["output"], relative(out.nan_to_num(9.0), expected))
            scattered(want[i], snapshots, slots, accepted)
            scattered(want[i], snapshots, tracks, tracked)
            mixed.fill_(float("nan"))  # its memory belongs to the next layer
        worst["verify wrote"] += int((caches.temporal != before).sum())
        if wrong != "no commit":
            update(pool, indices, accepted + (wrong == "one more"), tracks, tracked)
        touched = torch.zeros(SLOTS, dtype=torch.bool)
        touched[slots[accepted >= 0].long()] = True
        touched[tracks[tracked >= 0]] = True
        if touched.any():
            worst["state"] = max(worst["state"], relative(caches.temporal[:, touched], want[:, touched]))
        worst["elsewhere"] += int((caches.temporal[:, ~touched] != before[:, ~touched]).sum())
        worst["rejected"] += int((accepted < 0).sum())
    return worst


def main(folder: str, wrong: str) -> None:
    lines = announce(folder)
    stubs.importable()
    os.environ["HOPPER_GDN_SGLANG"] = "replay"
    importlib.import_module("sglang.srt.plugins").load_plugins()
    memory: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    backend = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    hybrid: Any = importlib.import_module("sglang.srt.layers.attention.hybrid_linear_attn_backend")
    scatter: Any = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    windows: list[int] = []
    scatter._conv_multi_eligible = lambda pairs: True
    scatter.fused_conv_window_scatter_multi = lambda pairs, *given: windows.append(len(pairs))
    states: list[int] = []
    scatter.fused_mamba_state_scatter_with_mask = lambda *given: states.append(1)
    kind = backend.LinearAttnKernelBackend
    dispatcher = backend.GDNKernelDispatcher(kind("triton"), kind("triton"), kind("triton"))

    def update(pool: Any, indices: Tensor, accepted: Tensor, tracks: Tensor, tracked: Tensor) -> None:
        """SGLang's own update after verify, on a backend that holds what it asks for."""
        linear = types.SimpleNamespace(
            _translate_mamba_indices=lambda given: given,
            forward_metadata=types.SimpleNamespace(mamba_cache_indices=indices),
            req_to_token_pool=types.SimpleNamespace(
                mamba_pool=pool, get_speculative_mamba2_params_all_layers=pool.get_speculative_mamba2_params_all_layers
            ),
            accept_lens_pool=None,
        )
        owner = types.SimpleNamespace(linear_attn_backend=linear, _update_ple_state_after_mtp_verify=lambda *given: 0)
        hybrid.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify(owner, accepted, tracks, tracked, None)

    hybrid.pp_spec_stable_rows_enabled = lambda: False
    logging.getLogger("sglang").setLevel(logging.ERROR)
    result: dict[str, Any] = {
        str(dtype): rounds(memory, dispatcher, update, dtype, wrong) for dtype in (torch.bfloat16, torch.float32)
    }
    pool = new_pool(memory, torch.bfloat16)
    kept = pool.mamba_cache.intermediate_ssm
    snapshots = LAYERS * (ROWS + 1) * STEPS * HV * V * K * 2
    result["kept"] = {"bytes": kept.shape[0], "snapshots": snapshots, "type": type(kept).__name__}
    plain = {"tree": {"speculative_eagle_topk": 2}, "steps": {"speculative_num_draft_tokens": 17}}
    result["plain"] = {
        why: type(new_pool(memory, torch.bfloat16, **other).mamba_cache.intermediate_ssm).__name__
        for why, other in plain.items()
    }
    none = new_pool(memory, torch.bfloat16, speculative_num_draft_tokens=None).mamba_cache
    result["plain"]["no drafts"] = type(getattr(none, "intermediate_ssm", None)).__name__
    result |= {"conv": len(windows), "stock states": len(states), "lines": lines}
    print("RESULT" + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
