"""On an H200, in a process of its own: our class in SGLang's dispatcher beside the stock one, whose Triton kernels run.

Prints one JSON object: relative L2 differences for each case, after a graph of ours was replayed on other tensors.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from typing import Any

import torch
from torch import Tensor

from tests.integration.sglang import stubs
from tests.integration.sglang.driver import relative

K = V = 128
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: H, HV, requests, draft tokens
SHAPES = ((2, 4, 5, 12), (16, 32, 9, 16), (4, 16, 3, 4))


def dispatcher() -> Any:
    """SGLang's own, with our class in it."""
    stubs.importable()
    os.environ["HOPPER_GDN_SGLANG"] = "1"
    backend = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    kind = backend.LinearAttnKernelBackend
    built = object.__new__(backend.GDNKernelDispatcher)
    build = importlib.import_module("integration.sglang").build_dispatcher
    build(backend.GDNKernelDispatcher.__init__, built, kind("triton"), kind("triton"), kind("triton"))
    return built


class Batch:
    """What the backend holds for a batch of a captured size; `fill` is what happens before a replay."""

    def __init__(self, H: int, HV: int, N: int, T: int, dtype: torch.dtype) -> None:
        self.sizes = [H * K, H * K, HV * V]
        self.H, self.HV, self.N, self.T = H, HV, N, T
        self.mixed = torch.empty(N * T, sum(self.sizes), dtype=torch.bfloat16, device="cuda")
        self.gates = torch.empty(2, N * T, HV, dtype=torch.bfloat16, device="cuda")
        self.A_log = torch.randn(HV, device="cuda")
        self.bias = torch.randn(HV, device="cuda").bfloat16()
        page = torch.randn(N + 3, 2 * HV * V * K, device="cuda").to(dtype)  # the pool is a part of every page
        self.pool = page[:, : HV * V * K].view(N + 3, HV, V, K)
        self.indices = torch.zeros(N, dtype=torch.int32, device="cuda")
        self.rows = torch.arange(N + 3, dtype=torch.int32, device="cuda")
        self.starts = torch.zeros(N + 1, dtype=torch.int32, device="cuda")
        self.fill(N)

    def fill(self, live: int) -> None:
        """`live` requests, two of them on one slot, and padding behind them: slot -1, no tokens, NaN."""
        self.mixed.normal_()
        self.gates.normal_()
        self.mixed[live * self.T :] = float("nan")
        self.gates[:, live * self.T :] = float("nan")
        slots = torch.randperm(self.N + 2)[: self.N] + 1
        slots[1] = slots[0]
        slots[live:] = -1
        self.indices.copy_(slots)
        self.starts.copy_((torch.arange(self.N + 1) * self.T).clamp(max=live * self.T))
        self.live = live

    def buffer(self) -> Tensor:
        shape = (self.N + 3, self.T, self.HV, V, K)
        return torch.full(shape, float("nan"), dtype=self.pool.dtype, device="cuda")

    def verify(self, kernel: Any, buffer: Tensor) -> Tensor:
        q, k, v = self.mixed.split(self.sizes, -1)
        out: Tensor = kernel.target_verify(
            A_log=self.A_log, dt_bias=self.bias, q=q.view(1, -1, self.H, K), k=k.view(1, -1, self.H, K),
            v=v.view(1, -1, self.HV, V), a=self.gates[0], b=self.gates[1], ssm_states=self.pool,
            cache_indices=self.indices, query_start_loc=self.starts, intermediate_states_buffer=buffer,
            intermediate_state_indices=self.rows, cache_steps=self.T, retrieve_parent_token=None,
        )  # fmt: skip
        return out

    def decode(self, kernel: Any, pool: Tensor) -> Tensor:
        out: Tensor = kernel.packed_decode(
            self.mixed[:: self.T], self.gates[0, :: self.T], self.gates[1, :: self.T], A_log=self.A_log,
            dt_bias=self.bias, scale=K**-0.5, ssm_states=pool, cache_indices=self.indices, num_v_heads=self.HV,
            head_v_dim=V,
        )  # fmt: skip
        return out


def graph_of(call: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = call()
    return graph, out


def case(built: Any, H: int, HV: int, N: int, T: int, dtype: torch.dtype) -> dict[str, float]:
    ours, stock = built.verify_kernel, built.tree_verify_kernel
    assert type(ours).__name__ == "HopperGDNKernel" and type(stock).__name__ == "TritonGDNKernel"
    batch = Batch(H, HV, N, T, dtype)
    got_states = batch.buffer()
    graph, got = graph_of(lambda: batch.verify(ours, got_states))
    batch.fill(N - 2)
    got_states.fill_(float("nan"))
    before = batch.pool.clone()
    graph.replay()
    want_states = batch.buffer()
    want = batch.verify(stock, want_states)
    tokens = batch.live * T
    result = {
        "verify": relative(got[0, :tokens], want[0, :tokens]),
        "states": relative(got_states[: batch.live], want_states[: batch.live]),
        "padded": int((got[0, tokens:] != 0).sum()),
        "states of nobody": int((~got_states[batch.live :].isnan()).sum()),
        "pool": int((batch.pool != before).sum()),
    }
    batch.indices[1] = 0  # decode writes: no slot twice
    pool = batch.pool.clone()
    graph, got = graph_of(lambda: batch.decode(ours, pool))
    pool.copy_(batch.pool)
    graph.replay()
    stock_pool = batch.pool.clone()
    want = batch.decode(stock, stock_pool)
    live = batch.indices[: batch.live].long()
    dead = [slot for slot in range(N + 3) if slot not in live.tolist()]
    return result | {
        "decode": relative(got[0, : batch.live], want[0, : batch.live]),
        "decoded": relative(pool[live], stock_pool[live]),
        "padded decode": int((got[0, batch.live :] != 0).sum()),
        "decode elsewhere": int((pool[dead] != batch.pool[dead]).sum()),
    }


def main() -> None:
    built = dispatcher()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    found = {
        f"{H}/{HV} heads, N={N}, T={T}, {name}": case(built, H, HV, N, T, DTYPES[name])
        for (H, HV, N, T), name in itertools.product(SHAPES, DTYPES)
    }
    said = sorted(importlib.import_module("integration.sglang.kernel")._said)
    print("RESULT" + json.dumps({"cases": found, "stock calls": said}))


if __name__ == "__main__":
    main()
