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
    ops = frozenset({"decode", "verify-replay", "verify-snapshots"})
    note = f"no pool: a dense state in, for decode a dense fp32 state out; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        if problem.shape.op == "verify-snapshots":
            raise Unsupported("keeps no per-token states")
        decode = problem.shape.op == "decode"
        if decode:
            refuse_unless(problem.shape, T=1)
        recurrent = found.modules("fla")[0].fused_recurrent_gated_delta_rule
        states = [problem.pool[indices.long()] for indices in problem.indices]

        def by_request(tokens: Tensor) -> Tensor:
            return tokens.unflatten(0, (problem.shape.N, problem.shape.T))

        q, k, v, a, b = map(by_request, (*problem.dense, problem.a, problem.b))
        shared: dict[str, Any] = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
        }
        calls = Calls(
            lambda way: recurrent(
                q, k, v, g=a, beta=b, scale=SCALE, initial_state=states[way], output_final_state=decode,
                A_log=problem.A_log, dt_bias=problem.dt_bias, **shared,
            )
        )  # fmt: skip

        def outputs() -> dict[str, Tensor]:
            o, final = calls.returned[0]
            return {"o": o, "final": final} if decode else {"o": o}

        return Bound(calls, outputs, problem.reset)


ENTRIES: tuple[type[Entry], ...] = (Recurrent,)
