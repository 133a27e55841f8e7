"""Verify by replay in SGLang: its snapshot buffer is never allocated, and accepted tokens are applied at commit.

SGLang keeps the state after every draft token in `intermediate_ssm` of its pool and copies one of them back when it
knows how many tokens were accepted. Here a `Tape` stands in that field: for each layer the k, v, a and b of the last
verify, from which `kernels.replay.commit` computes the accepted state. SGLang passes the field on untouched, so two
hooks are enough: around the pool's constructor, and around the function that copies the states back.

The ingredients are copied into buffers of the tape, inside the verify call: what the call was given belongs to the
layers behind it afterwards, under graph replay above all.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.replay.api import commit, verify

POOL = "sglang.srt.mem_cache.memory_pool.MambaPool.__init__"
COMMIT = "sglang.srt.layers.attention.hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify"
MOST_STEPS = 16
OTHERWISE = "start SGLang with HOPPER_GDN_SGLANG=1, which keeps snapshots"

_logger = logging.getLogger("hopper_gdn")


@dataclasses.dataclass
class Layer:
    """One layer's part of a tape: k [rows * D, H, K], v [rows * D, HV, V], a and b [rows * D, HV], starts [rows + 1].

    `starts` belongs to all layers; the one with `first` writes it.
    """

    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    starts: Tensor
    steps: int
    first: bool
    gates: tuple[Tensor, Tensor] | None = None  # A_log and dt_bias of the layer, once it was verified

    def verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **given: Any
    ) -> Tensor:
        """TritonGDNKernel.target_verify without snapshots: its arguments, its output. The pool is not written.

        Raises RuntimeError where the call cannot be served: there is no stock path without snapshots.
        """
        starts = given["query_start_loc"]
        try:
            if given.get("retrieve_parent_token") is not None:
                raise ValueError("draft tokens form a tree")
            if given.get("stable_rows"):
                raise ValueError("pipeline parallelism keeps rows of requests apart from their places")
            for name, got, kept in (("k", k, self.k), ("v", v, self.v), ("a", a, self.a), ("b", b, self.b)):
                if got.dtype != kept.dtype:
                    raise TypeError(f"{name} is {got.dtype}, and {kept.dtype} is kept")
            out = verify(
                A_log, a, dt_bias, q, k, v, b, given["ssm_states"], given["cache_indices"][: starts.shape[0] - 1],
                starts, max_tokens=given["cache_steps"],
            )  # fmt: skip
        except (TypeError, ValueError) as reason:
            raise RuntimeError(f"verify by replay cannot serve this call: {reason}; {OTHERWISE}") from reason
        self.gates = (A_log, dt_bias)
        tokens = min(v.shape[1], len(self.v))  # a batch padded beyond the pool has nothing of interest there
        for kept, got in ((self.k, k[0]), (self.v, v[0]), (self.a, a), (self.b, b)):
            kept[:tokens].copy_(got[:tokens])
        if self.first:
            rows = min(len(starts), len(self.starts))
            self.starts[:rows].copy_(starts[:rows])
        return out

    def commit(self, states: Tensor, slots: Tensor, lengths: Tensor, targets: Tensor | None) -> None:
        """Apply the first `lengths[n]` kept tokens of request n to states[slots[n]], in place or into `targets`."""
        if self.gates is None:
            raise RuntimeError("commit before the first verify: nothing is kept")
        A_log, dt_bias = self.gates
        tokens = len(slots) * self.steps
        commit(
            A_log, self.a[:tokens], dt_bias, self.k[:tokens], self.v[:tokens], self.b[:tokens], states, slots,
            self.starts[: len(slots) + 1], lengths, target_indices=targets, max_tokens=self.steps,
        )  # fmt: skip


class Tape:
    """What stands in `intermediate_ssm`. Indexed by layer, as SGLang does; `shape` and `dtype` say its size."""

    dtype = torch.uint8

    def __init__(
        self, layers: int, rows: int, steps: int, H: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str
    ) -> None:
        """Of `rows` requests with up to `steps` tokens; heads: HV, V, K; dtype of q, k, v, a and b."""
        HV, V, K = heads
        shapes = ((H, K), (HV, V), (HV,), (HV,))
        starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        kept = [torch.zeros(layers, rows * steps, *shape, dtype=dtype, device=device) for shape in shapes]
        k, v, a, b = kept
        self.layers = [Layer(k[i], v[i], a[i], b[i], starts, steps, first=i == 0) for i in range(layers)]
        self.shape = (sum(x.numel() * x.element_size() for x in (*kept, starts)),)

    def __getitem__(self, layer: int) -> Layer:
        return self.layers[layer]

    def commit(
        self, states: Tensor, slots: Tensor, steps: Tensor, track_slots: Tensor | None, track_steps: Tensor | None
    ) -> None:
        """states: [layers, slots, HV, V, K]; steps: [N], index of the last accepted token, -1 for none.

        track_slots, track_steps: a second state of every request to keep, read from before the first one is written.
        """
        slots, lengths = slots.int(), steps.int() + 1
        tracks = None
        if track_slots is not None and track_steps is not None:
            tracks = (torch.where(track_steps >= 0, track_slots, -1).int(), track_steps.int() + 1)
        for layer, pool in zip(self.layers, states, strict=True):
            if tracks:
                layer.commit(pool, slots, tracks[1], tracks[0])
            layer.commit(pool, slots, lengths, None)


class _WithoutSnapshots(TorchFunctionMode):
    """The one allocation of this shape gets no memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.spared = shape, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.zeros and tuple(kwargs.get("size", ())) == self.shape:
            kwargs["device"] = "meta"
            self.spared += 1
        return func(*args, **kwargs)


def unfit(given: dict[str, Any]) -> str:
    """Why a pool with these arguments of its constructor keeps its snapshots; "" if it need not."""
    params, steps = given["cache_params"], given["speculative_num_draft_tokens"]
    if params.is_kda:
        return "its layers are KDA"
    if steps > MOST_STEPS:
        return f"{steps} draft tokens, at most {MOST_STEPS} are replayed"
    if (given.get("speculative_eagle_topk") or 1) > 1:
        return "draft tokens form a tree"
    if given.get("enable_linear_replayssm") or given.get("enable_linear_replayssm_spec"):
        return "ReplaySSM keeps its own ring"
    if params.dtype.conv != torch.bfloat16:
        return f"activations are {params.dtype.conv}, and bfloat16 is replayed"
    return ""


def build_pool(original: Any, pool: Any, **given: Any) -> None:
    """Around MambaPool.__init__: a tape in place of the snapshots, where the pool has any and they can be spared."""
    steps = given.get("speculative_num_draft_tokens")
    if steps is None:
        original(pool, **given)
        return
    if reason := unfit(given):
        _logger.warning("SGLang: verify keeps snapshots: %s", reason)
        original(pool, **given)
        return
    params = given["cache_params"]
    layers, rows = len(given["mamba_layer_ids"]), given["spec_state_size"] + 1
    shape = (layers, rows, steps, *params.shape.temporal)
    with _WithoutSnapshots(shape) as allocations:
        original(pool, **given)
    if allocations.spared != 1:
        raise RuntimeError(f"SGLang's pool does not allocate its snapshots as 0.5.23 does; {OTHERWISE}")
    tape = Tape(
        layers, rows, steps, params.shape.num_k_heads_per_tp, params.shape.temporal, params.dtype.conv, given["device"]
    )
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, intermediate_ssm=tape)
    spared = math.prod(shape) * params.dtype.temporal.itemsize
    pool.mem_usage -= (spared - tape.shape[0]) / 2**30
    _logger.info(
        "SGLang: verify by replay: %.3f GiB for tokens in place of %.3f GiB of snapshots",
        tape.shape[0] / 2**30,
        spared / 2**30,
    )


def commit_states(
    original: Any, caches: Any, slots: Tensor, steps: Tensor, track_slots: Tensor | None, track_steps: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:  # fmt: skip
    """Around scatter_mamba_states_after_mtp_verify: the states from the tape, the rest as SGLang does it."""
    tape = caches.intermediate_ssm
    if isinstance(tape, Tape):
        if src_indices_raw is not None:
            raise RuntimeError(f"verify by replay does not serve pipeline parallelism; {OTHERWISE}")
        tape.commit(caches.temporal, slots, steps, track_slots, track_steps)
        caches = dataclasses.replace(caches, temporal=caches.temporal[:0])  # empty: nothing left to copy there
    original(caches, slots, steps, track_slots, track_steps, src_indices_raw=src_indices_raw)


def install() -> None:
    """Register both hooks with SGLang."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(POOL, build_pool, hooks.HookType.AROUND)
    hooks.HookRegistry.register(COMMIT, commit_states, hooks.HookType.AROUND)
