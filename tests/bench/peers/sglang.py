"""SGLang's Triton kernels, called as its GDN backend calls them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from tests.bench.implementation import Bound, refuse_unless
from tests.bench.peers import found
from tests.bench.peers.entry import Calls, Entry, per_request, true_snapshots
from tests.bench.problem import SCALE, Problem, V


def _gating(problem: Problem) -> dict[str, Any]:
    """Arguments of the fused kernel that verify and decode share. q, k, v are views of the projection's rows."""
    return {
        "A_log": problem.A_log,
        "dt_bias": problem.dt_bias.bfloat16(),
        "q": problem.q[None],
        "k": problem.k[None],
        "v": problem.v[None],
        "a": problem.a,
        "b": problem.b,
        "initial_state_source": problem.pool,
        "cu_seqlens": problem.cu_seqlens,
        "use_qk_l2norm_in_kernel": True,
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
    }


class Verify(Entry):
    peer, entry = "sglang", "triton-verify"
    ops = frozenset({"verify-snapshots"})
    note = "with programmatic dependent launch"

    def function(self) -> Callable[..., Any]:
        return found.modules("sglang")[0].fused_sigmoid_gating_delta_rule_update

    def bind(self, problem: Problem) -> Bound:
        verify, shared, snapshots = self.function(), _gating(problem), problem.snapshots
        calls = Calls(
            lambda way: verify(
                **shared,
                initial_state_indices=problem.indices[way],
                is_kda=False,
                disable_state_update=True,
                intermediate_states_buffer=snapshots[way],
                intermediate_state_indices=problem.rows,
                cache_steps=problem.shape.T,
                retrieve_parent_token=None,
            )
        )
        return Bound(
            calls,
            lambda: {"o": per_request(problem, calls.returned[0]), "states": snapshots[0]},
            problem.reset,
        )


class VerifyWithoutPdl(Verify):
    entry = "triton-verify-no-pdl"
    note = "without programmatic dependent launch"

    def function(self) -> Callable[..., Any]:
        """The same function, which asks its module whether the device has programmatic dependent launch."""
        original = super().function()
        names = {**original.__globals__, "is_arch_support_pdl": lambda: False}
        return types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)


class FusedDecode(Entry):
    peer, entry = "sglang", "triton-fused"
    ops = frozenset({"decode"})
    note = "with programmatic dependent launch"

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=1)
        decode, shared = found.modules("sglang")[0].fused_sigmoid_gating_delta_rule_update, _gating(problem)
        calls = Calls(lambda way: decode(**shared, initial_state_indices=problem.indices[way]))
        return Bound(
            calls,
            lambda: {"o": per_request(problem, calls.returned[0]), "final": problem.states_of_way_0()},
            problem.reset,
        )


class PackedDecode(Entry):
    """Its default decode: reads q, k, v out of the projection's rows."""

    peer, entry = "sglang", "triton-packed"
    ops = frozenset({"decode"})
    module = 1

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=1)
        decode = found.modules(self.peer)[self.module].fused_recurrent_gated_delta_rule_packed_decode
        dt_bias, out = problem.dt_bias.bfloat16(), problem.o.view(problem.shape.N, 1, problem.shape.HV, V)

        def launch(way: int) -> None:
            decode(
                mixed_qkv=problem.mixed,
                a=problem.a,
                b=problem.b,
                A_log=problem.A_log,
                dt_bias=dt_bias,
                scale=SCALE,
                initial_state=problem.pool,
                out=out,
                ssm_state_indices=problem.indices[way],
                use_qk_l2norm_in_kernel=True,
            )

        return Bound(launch, lambda: {"o": out, "final": problem.states_of_way_0()}, problem.reset)


class SnapshotScatter(Entry):
    """Commits by copying the accepted token's snapshot into the pool."""

    peer, entry = "sglang", "snapshot-scatter"
    ops = frozenset({"commit"})
    note = "copies the accepted snapshot; SGLang commits all layers in one launch, this is one layer"

    def bind(self, problem: Problem) -> Bound:
        scatter = found.modules("sglang")[2].fused_mamba_state_scatter_with_mask
        steps, snapshots, truth = problem.lengths - 1, problem.snapshots, true_snapshots(problem)
        snapshots.copy_(truth.expand_as(snapshots))
        slots = problem.indices[0].long()

        def launch(way: int) -> None:
            scatter(problem.pool[None], snapshots[way][None], problem.indices[way], steps, problem.rows)

        def reset() -> None:
            problem.reset()
            snapshots[0].copy_(truth)
            problem.pool[slots] = torch.nan

        return Bound(launch, lambda: {"final": problem.states_of_way_0()}, reset)


ENTRIES: tuple[type[Entry], ...] = (Verify, VerifyWithoutPdl, FusedDecode, PackedDecode, SnapshotScatter)
