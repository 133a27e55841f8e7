"""flash-linear-attention: a dense state per request in and out, no pool and no states between tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.bench.implementation import Bound, Unsupported, refuse_unless
from tests.bench.peers import found
from tests.bench.peers.entry import DENSE, Calls, Entry
from tests.bench.problem import SCALE, Problem


class Recurrent(Entry):
    peer, entry = "fla", "fused-recurrent"
    ops = frozenset({"decode-dense", "verify-replay", "verify-snapshots"})
    note = f"dense states, allocates what it returns; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        if problem.shape.op == "verify-snapshots":
            raise Unsupported("keeps no per-token states")
        decode = problem.shape.op == "decode-dense"
        if decode:
            refuse_unless(problem.shape, pool="fp32")
        recurrent = found.modules("fla")[0].fused_recurrent_gated_delta_rule
        q, k, v = (x.unflatten(0, (problem.shape.N, problem.shape.T)) for x in problem.dense)
        gates, states = _activated(problem) if decode else _raw(problem)
        calls = Calls(
            lambda way: recurrent(
                q, k, v, scale=SCALE, initial_state=states[way], output_final_state=decode,
                use_qk_l2norm_in_kernel=True, **gates,
            )
        )  # fmt: skip

        def outputs() -> dict[str, Tensor]:
            o, final = calls.returned[0]
            return {"o": o, "final": final.mT} if decode else {"o": o}

        return Bound(calls, outputs, problem.reset)


def _activated(problem: Problem) -> tuple[dict[str, Any], Tensor]:
    """Gates computed before, and K-major states: its defaults."""
    g, beta = problem.activated
    return {"g": g, "beta": beta}, problem.initial_k_major


def _raw(problem: Problem) -> tuple[dict[str, Any], list[Tensor]]:
    """Gates computed inside, and V-major states, as verify has them."""
    a, b = (x.unflatten(0, (problem.shape.N, problem.shape.T)) for x in (problem.a, problem.b))
    gates = {
        "g": a,
        "beta": b,
        "A_log": problem.A_log,
        "dt_bias": problem.dt_bias,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }
    return gates, [problem.pool[indices.long()] for indices in problem.indices]


ENTRIES: tuple[type[Entry], ...] = (Recurrent,)
