"""Our kernels as implementations: the low-level entries, which neither allocate nor synchronise."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels import replay
from kernels.decode import (
    fused_recurrent_gdr_decode_fwd,
    fused_recurrent_gdr_fwd,
    packed_recurrent_gated_delta_rule_decode,
    recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_decode,
)
from kernels.prepass import fused_recurrent_gdr_verify_prepass
from kernels.verify import fused_recurrent_gdr_verify_fwd, fused_recurrent_gdr_verify_gated_fwd
from tests.bench.implementation import Bound, Eager, Implementation, Unsupported, refuse_unless
from tests.bench.problem import FULL_HISTORY, RING, RING_OPS, Problem, Shape


class Ours:
    """What all of them have in common: `name`, `ops` and `note` of an `Implementation`, and that they are here."""

    name: str
    ops: frozenset[str]
    note: str = ""

    def absent(self) -> str:
        return ""

    def bind(self, problem: Problem) -> Bound:
        """Raises Unsupported for a shape outside the implementation."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Verify(Ours):
    """The verify program that the plan picks. Without `snapshots` its rows are -1, so that it stores no state."""

    name: str
    ops: frozenset[str] = frozenset({"verify-snapshots"})
    note: str = ""
    snapshots: bool = True
    lossless: bool = False
    head_batch: int = 1

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape
        if not is_for(self, shape):
            raise Unsupported(f"HV / H is {shape.HV // shape.H}, supported: multiples of {self.head_batch}")
        if self.snapshots:
            states, rows = p.snapshots, p.rows
        else:
            states = p.pool.new_empty(1, 1, *p.pool.shape[1:]).expand(1, shape.T, *p.pool.shape[1:])
            rows = torch.full_like(p.rows, -1)

        def launch(way: int) -> None:
            fused_recurrent_gdr_verify_gated_fwd(
                p.q, p.k, p.v, p.a, p.b, p.A_log, p.dt_bias, p.pool, p.indices[way], p.cu_seqlens, p.o,
                states[way] if self.snapshots else states, rows, lossless=self.lossless, head_batch=self.head_batch,
            )  # fmt: skip

        def outputs() -> dict[str, Tensor]:
            found = {"o": p.o.unflatten(0, (shape.N, shape.T))}
            return found | {"states": states[0]} if self.snapshots else found

        return Bound(launch, outputs, p.reset)


class Replay(Ours):
    """Outputs alone, from a pool that is only read."""

    name = "kernels/replay"
    ops = frozenset({"verify-replay"})

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape

        def call(way: int = 0) -> Tensor:
            return replay.verify(
                p.A_log, p.a, p.dt_bias, p.q, p.k, p.v, p.b, p.pool, p.indices[way], p.cu_seqlens,
                max_tokens=shape.T, o=p.o,
            )  # fmt: skip

        eager = Eager(call, "`kernels.replay.verify`, o given")
        return Bound(call, lambda: {"o": p.o.unflatten(0, (shape.N, shape.T))}, p.reset, eager)


class Commit(Ours):
    """Accepted tokens applied to the states in place, from the inputs of the verify."""

    name = "kernels/replay-commit"
    ops = frozenset({"commit"})
    note = "from q, k, v, a, b of the tokens; no snapshots exist"

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape

        def call(way: int = 0) -> None:
            replay.commit(
                p.A_log, p.a, p.dt_bias, p.k, p.v, p.b, p.pool, p.indices[way], p.cu_seqlens, p.lengths,
                max_tokens=shape.T,
            )  # fmt: skip

        return Bound(call, lambda: {"final": p.states_of_way_0()}, p.reset, Eager(call, "`kernels.replay.commit`"))


class Ring(Ours):
    """Verify or decode behind a ring, and a launch in the place of the one that moves cursors.

    Moved cursors would make the next launch another one. Here they stay, but for the numbers of the folds: each launch
    is asked for the same folds again.
    """

    name = "kernels/replay-ring"
    ops = frozenset(RING_OPS)
    note = "with a second launch, as small as the one that moves a server's cursors"

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape
        window = replay.ring.Window.allocate(p.pool, shape.H, max_tokens=shape.T)
        again = torch.where(p.history == FULL_HISTORY, p.history, 0)
        asked = torch.zeros_like(window.cursors)
        _, k, v = p.split(p.past_mixed)
        for indices in p.indices:
            slots = indices.long()
            for kept, past in ((window.k, k), (window.v, v), (window.a, p.past_a), (window.b, p.past_b)):
                kept[slots, :RING] = past.unflatten(0, (shape.N, RING))
            first, number = torch.zeros_like(again), (again > 0).int()
            window.cursors[slots] = torch.stack((first, again, p.history - again, number), dim=1)
            asked[slots, 3] = number
        before = [x[p.indices[0].long()] for x in (window.k, window.v, window.a, window.b, window.cursors)]

        def call(way: int = 0) -> Tensor:
            return replay.ring.verify(
                p.A_log, p.a, p.dt_bias, p.q, p.k, p.v, p.b, p.pool, p.indices[way], p.cu_seqlens, window, o=p.o
            )  # fmt: skip

        def launch(way: int) -> None:
            call(way)
            window.cursors.add_(asked)

        def reset() -> None:
            p.reset()
            slots = p.indices[0].long()
            for x, old in zip((window.k, window.v, window.a, window.b, window.cursors), before, strict=True):
                x[slots] = old
            window.marks[slots] = 0

        def outputs() -> dict[str, Tensor]:
            return {"o": p.o.unflatten(0, (shape.N, shape.T)), "final": p.states_of_way_0()}

        return Bound(launch, outputs, reset, Eager(call, "`kernels.replay.ring.verify`, o given"))


def is_for(implementation: Implementation, shape: Shape) -> bool:
    """False for an option of ours that has no meaning for these heads. Anything else ours has to take."""
    batch = implementation.head_batch if isinstance(implementation, Verify) else 1
    return shape.HV // shape.H % batch == 0


class BehindPrepass(Ours):
    """The verify program on gates and norms of a launch before it; both launches are timed."""

    name = "kernels/verify-chunk-prepass"
    ops = frozenset({"verify-snapshots"})
    note = "two launches: gates and norms once per token, then verify"

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape
        tokens = shape.N * shape.T
        g, beta = torch.empty(2, tokens, shape.HV, device=p.device)
        q_inv_norm, k_inv_norm = torch.empty(2, tokens, shape.H, device=p.device)

        def launch(way: int) -> None:
            fused_recurrent_gdr_verify_prepass(p.q, p.k, p.a, p.b, p.A_log, p.dt_bias, g, beta, q_inv_norm, k_inv_norm)
            fused_recurrent_gdr_verify_fwd(
                p.q, p.k, p.v, g, beta, p.pool, p.indices[way], p.cu_seqlens, p.o, p.snapshots[way], p.rows,
                q_inv_norm=q_inv_norm, k_inv_norm=k_inv_norm,
            )  # fmt: skip

        def outputs() -> dict[str, Tensor]:
            return {"o": p.o.unflatten(0, (shape.N, shape.T)), "states": p.snapshots[0]}

        return Bound(launch, outputs, p.reset)


class Decode(Ours):
    """q, k, v as views of the projection's rows; the states in place."""

    name = "kernels/decode"
    ops = frozenset({"decode"})

    def bind(self, problem: Problem) -> Bound:
        p = problem
        refuse_unless(p.shape, T=1)

        def launch(way: int) -> None:
            fused_recurrent_gdr_decode_fwd(
                p.q, p.k, p.v, p.a, p.b, p.A_log, p.dt_bias, p.pool, p.indices[way], p.o
            )  # fmt: skip

        def call() -> Tensor:
            return recurrent_gated_delta_rule_decode(
                p.A_log, p.a, p.dt_bias, p.q, p.k, p.v, p.b, p.pool, p.indices[0], p.o
            )  # fmt: skip

        eager = Eager(call, "`recurrent_gated_delta_rule_decode`, o given")
        return Bound(launch, lambda: _in_place(p), p.reset, eager)


class PackedDecode(Ours):
    """The projection's rows as they are."""

    name = "kernels/decode-packed"
    ops = frozenset({"decode"})

    def bind(self, problem: Problem) -> Bound:
        p = problem
        refuse_unless(p.shape, T=1)

        def call(way: int = 0) -> Tensor:
            return packed_recurrent_gated_delta_rule_decode(
                p.mixed, p.a, p.b, p.A_log, p.dt_bias, p.pool, p.indices[way], p.o
            )  # fmt: skip

        eager = Eager(call, "`packed_recurrent_gated_delta_rule_decode`, o given")
        return Bound(call, lambda: _in_place(p), p.reset, eager)


def _in_place(problem: Problem) -> dict[str, Tensor]:
    """The outputs of a decode that leaves its states in the pool."""
    return {"o": problem.o[:, None], "final": problem.states_of_way_0()}


class DenseDecode(Ours):
    """From dense K-major states to others, gates computed before; q, k, v as views of the projection's rows."""

    name = "kernels/decode-dense"
    ops = frozenset({"decode-dense"})

    def bind(self, problem: Problem) -> Bound:
        p = problem
        refuse_unless(p.shape, pool="fp32")
        q, k, v, o = (x.unflatten(0, (p.shape.N, p.shape.T)) for x in (p.q, p.k, p.v, p.o))
        (g, beta), initial, final = p.activated, p.initial_k_major, p.final_k_major

        def launch(way: int) -> None:
            fused_recurrent_gdr_fwd(
                q, k, v, g, beta, o, initial[way], final[way], use_qk_l2norm_in_kernel=True
            )  # fmt: skip

        def call() -> tuple[Tensor, Tensor | None]:
            return recurrent_gated_delta_rule(
                q, k, v, g, beta, initial_state=initial[0], use_qk_l2norm_in_kernel=True
            )  # fmt: skip

        eager = Eager(call, "`recurrent_gated_delta_rule`, which allocates o and the states")
        return Bound(launch, lambda: {"o": o, "final": final[0].mT}, p.reset, eager)


def ours() -> list[Implementation]:
    """Every program of kernels/ that computes one of the benchmark's ops, with the options that do."""
    stores_none = "the verify program with rows of -1, so that it stores no snapshot"
    return [
        Verify("kernels/verify"),
        BehindPrepass(),
        Verify("kernels/verify-chunk-two-heads", note="head_batch=2", head_batch=2),
        Verify("kernels/verify-lossless", note="the bits of T decode calls", lossless=True),
        Replay(),
        Commit(),
        Ring(),
        Verify("kernels/verify-no-snapshots", frozenset({"verify-replay"}), stores_none, snapshots=False),
        Decode(),
        PackedDecode(),
        DenseDecode(),
    ]
