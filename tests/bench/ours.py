"""Our kernels as implementations: the low-level entries, which neither allocate nor synchronise."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.prepass import fused_recurrent_gdr_verify_prepass
from kernels.verify import fused_recurrent_gdr_verify_fwd, fused_recurrent_gdr_verify_gated_fwd
from tests.bench.implementation import Bound, Implementation, Unsupported, refuse_unless
from tests.bench.problem import Problem


@dataclasses.dataclass(frozen=True)
class Verify:
    """The verify program. Without `snapshots` its rows are -1, so that it stores no state but a committed one."""

    name: str
    ops: frozenset[str]
    note: str
    snapshots: bool = True
    commit: bool = False
    lossless: bool = False
    head_batch: int = 1

    def absent(self) -> str:
        return ""

    def bind(self, problem: Problem) -> Bound:
        p, shape = problem, problem.shape
        if self.commit:
            refuse_unless(shape, T=1)
        if shape.HV // shape.H % self.head_batch:
            raise Unsupported(f"HV / H is {shape.HV // shape.H}, supported: multiples of {self.head_batch}")
        if self.snapshots:
            states, rows = p.snapshots, p.rows
        else:
            states = p.pool.new_empty(1, 1, *p.pool.shape[1:]).expand(1, shape.T, *p.pool.shape[1:])
            rows = torch.full_like(p.rows, -1)

        def launch(way: int) -> None:
            fused_recurrent_gdr_verify_gated_fwd(
                p.q, p.k, p.v, p.a, p.b, p.A_log, p.dt_bias, p.pool, p.indices[way], p.cu_seqlens, p.o,
                states[way] if self.snapshots else states, rows, disable_state_update=not self.commit,
                lossless=self.lossless, head_batch=self.head_batch,
            )  # fmt: skip

        def outputs() -> dict[str, Tensor]:
            found = {"o": p.o.unflatten(0, (shape.N, shape.T))}
            if self.snapshots:
                found["states"] = states[0]
            if self.commit:
                found["final"] = p.states_of_way_0()
            return found

        return Bound(launch, outputs, p.reset)


@dataclasses.dataclass(frozen=True)
class BehindPrepass:
    """The verify program on gates and norms of a launch before it; both launches are timed."""

    name: str
    note: str
    ops: frozenset[str] = frozenset({"verify-snapshots"})

    def absent(self) -> str:
        return ""

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


def ours() -> list[Implementation]:
    """Every program of kernels/ that computes one of the benchmark's ops, with the options that do."""
    snapshots = frozenset({"verify-snapshots"})
    stores_none = "the verify program with rows of -1, so that it stores no snapshot"
    return [
        Verify("kernels/verify-chunk", snapshots, ""),
        BehindPrepass("kernels/verify-chunk-prepass", "two launches: gates and norms once per token, then verify"),
        Verify("kernels/verify-chunk-two-heads", snapshots, "head_batch=2", head_batch=2),
        Verify("kernels/verify-lossless", snapshots, "the bits of T decode calls", lossless=True),
        Verify("kernels/verify-chunk-no-snapshots", frozenset({"verify-replay"}), stores_none, snapshots=False),
        Verify("kernels/verify-chunk-commit", frozenset({"decode"}), f"T = 1, {stores_none}", False, True),
    ]
