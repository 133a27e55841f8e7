"""FlashInfer's bf16-state kernels. They run in a process of their own: its tvm_ffi and TileLang's exclude each other.

This module is imported by both sides. Only the worker binds; the proxies of flashinfer.py read names and notes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.bench.implementation import Bound, refuse_unless
from tests.bench.peers import flashinfer_runtime, found
from tests.bench.peers.entry import DENSE, Calls, Entry
from tests.bench.problem import RING, SCALE, K, Problem, V

#: tokens of the ring kernel, and the depth of its rings
RING_TOKENS, RING_DEPTH = (4, 8), 32
Modules = tuple[ModuleType, ...]


@functools.cache
def load_modules() -> Modules:
    """The three wrapper modules (states, outputs only, ring), compiled ahead of time unless flashinfer is installed."""
    folder = found.unpacked_folder("flashinfer")
    if folder is None:
        return found.modules("flashinfer")
    return found.load_unpacked("flashinfer", flashinfer_runtime.stand_ins(flashinfer_runtime.Library(folder).find))


class FlashInfer(Entry):
    peer = "flashinfer"
    note = DENSE

    def __init__(self, modules: Callable[[], Modules] = load_modules) -> None:
        super().__init__()
        self.modules = modules

    def absent(self) -> str:
        folder = found.unpacked_folder("flashinfer")
        if folder is not None and not (folder / flashinfer_runtime.LIBRARY).exists():
            return f"not here: {folder} has no compiled kernels, run nox -s peers -- flashinfer"
        return found.missing("flashinfer")

    def arguments(self, problem: Problem) -> dict[str, Any]:
        """What every wrapper takes; tokens as [N, T, ...]. Raises Unsupported."""
        shape = problem.shape
        refuse_unless(shape, pool="bf16")

        def by_request(tokens: Tensor) -> Tensor:
            return tokens.unflatten(0, (shape.N, shape.T))

        q, k, v, a, b = map(by_request, (*problem.dense, problem.a, problem.b))
        return {
            **{"A_log": problem.A_log, "dt_bias": problem.dt_bias, "scale": SCALE},
            **{"q": q, "k": k, "v": v, "a": a, "b": b, "initial_state_source": problem.pool},
        }


class Decode(FlashInfer):
    entry = "decode"
    ops = frozenset({"decode"})

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=1)
        shared, decode = self.arguments(problem), self.modules()[0].gated_delta_rule
        o = problem.o.unflatten(0, (problem.shape.N, 1))
        return Bound(
            lambda way: decode(**shared, initial_state_indices=problem.indices[way], output=o),
            lambda: {"o": o, "final": problem.states_of_way_0()},
            problem.reset,
        )


class Intermediates(FlashInfer):
    entry = "mtp-intermediates"
    ops = frozenset({"verify-snapshots"})

    def bind(self, problem: Problem) -> Bound:
        shared, verify = self.arguments(problem), self.modules()[0].gated_delta_rule_mtp
        snapshots, o = problem.snapshots, problem.o.unflatten(0, (problem.shape.N, problem.shape.T))

        def launch(way: int) -> None:
            verify(
                **shared,
                initial_state_indices=problem.indices[way],
                intermediate_states_buffer=snapshots[way],
                disable_state_update=True,
                output=o,
            )

        return Bound(launch, lambda: {"o": o, "states": snapshots[0]}, problem.reset)


class Outputs(FlashInfer):
    """Token after token, nothing written but o."""

    entry = "mtp-outputs"
    ops = frozenset({"verify-replay"})

    def bind(self, problem: Problem) -> Bound:
        shared, verify = self.arguments(problem), self.modules()[0].gated_delta_rule_mtp
        o = problem.o.unflatten(0, (problem.shape.N, problem.shape.T))
        return Bound(
            lambda way: verify(
                **shared, initial_state_indices=problem.indices[way], disable_state_update=True, output=o
            ),
            lambda: {"o": o},
            problem.reset,
        )


class WyOutputs(FlashInfer):
    """All tokens as one chunk on tensor cores, nothing written but o."""

    entry = "wy-output-only"
    ops = frozenset({"verify-replay"})
    note = f"the whole call, which copies its inputs to padded buffers for T outside 4, 8, 16; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=tuple(range(1, 17)))
        shared, verify = self.arguments(problem), self.modules()[1].gated_delta_rule_mtp
        # without `output`: given one, it would compute elsewhere and copy
        calls = Calls(
            lambda way: verify(**shared, initial_state_indices=problem.indices[way], disable_state_update=True)
        )
        return Bound(calls, lambda: {"o": calls.returned[0]}, problem.reset)


class Recover(FlashInfer):
    """Commits by computing the accepted tokens again, without outputs."""

    entry = "mtp-recover"
    ops = frozenset({"commit"})
    note = f"computes the accepted tokens again from q, k, v and gates; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        shared, commit = self.arguments(problem), self.modules()[0].gated_delta_rule_mtp
        last = problem.lengths - 1  # it wants the index of the last accepted token
        o = problem.o.unflatten(0, (problem.shape.N, problem.shape.T))
        return Bound(
            lambda way: commit(
                **shared,
                initial_state_indices=problem.indices[way],
                accepted_steps=last,
                disable_output=True,
                output=o,
            ),
            lambda: {"final": problem.states_of_way_0()},
            problem.reset,
        )


class RingFlush(FlashInfer):
    """Verify with the last accepted tokens in rings beside the states; full rings are folded into them."""

    entry = "ring-flush"
    ops = frozenset({"ring"})

    def bind(self, problem: Problem) -> Bound:
        shape, device = problem.shape, problem.device
        refuse_unless(shape, T=RING_TOKENS)
        shared, verify = self.arguments(problem), self.modules()[2].gated_delta_rule_mtp_ucache_flush
        slots = problem.pool.shape[0]
        rings = {
            "k_cache": torch.zeros(slots, shape.H, RING_DEPTH, K, dtype=torch.bfloat16, device=device),
            "u_cache": torch.zeros(slots, shape.HV, RING_DEPTH, V, dtype=torch.bfloat16, device=device),
            "g_cache": torch.zeros(slots, shape.HV, RING_DEPTH, device=device),
            "cache_base": torch.zeros(shape.N, dtype=torch.int32, device=device),
        }
        fixed: dict[str, Any] = {**rings, "restart_hist_on_flush": False}

        step = RING_TOKENS[0]
        for start in range(0, RING, step):
            past = {**shared, **_past_tokens(problem, start, step)}
            length = torch.full((shape.N,), start, dtype=torch.int32, device=device)
            for indices in problem.indices:
                verify(**past, **fixed, initial_state_indices=indices, hist_len=length)

        calls = Calls(
            lambda way: verify(**shared, **fixed, initial_state_indices=problem.indices[way], hist_len=problem.history)
        )
        return Bound(calls, lambda: {"o": calls.returned[0], "final": problem.states_of_way_0()}, problem.reset)


def _past_tokens(problem: Problem, start: int, count: int) -> dict[str, Tensor]:
    """q, k, v, a, b [N, count, ...] of the accepted tokens from `start` on."""

    def part(tokens: Tensor) -> Tensor:
        # contiguous() would keep the strides of a single request, which its wrapper then takes for a padded tensor
        return tokens.unflatten(0, (problem.shape.N, RING))[:, start : start + count].clone(
            memory_format=torch.contiguous_format
        )

    q, k, v = problem.split(problem.past_mixed)
    rows = {"q": q, "k": k, "v": v, "a": problem.past_a, "b": problem.past_b}
    return {name: part(tokens) for name, tokens in rows.items()}


ENTRIES: tuple[type[FlashInfer], ...] = (Decode, Intermediates, Outputs, WyOutputs, Recover, RingFlush)


def entries() -> list[Entry]:
    """What the worker serves."""
    return [entry() for entry in ENTRIES]
