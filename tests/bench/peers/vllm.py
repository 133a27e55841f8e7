"""vLLM's kernels. Its pool has a block per token of a request: the state after a token is written in place to it."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from tests.bench.implementation import Bound, refuse_unless
from tests.bench.peers import found, sglang
from tests.bench.peers.entry import DENSE, Calls, Entry, per_request
from tests.bench.peers.pins import PEERS
from tests.bench.problem import SCALE, K, Problem, V


class Blocks:
    """A pool [1 + ways * N * T, HV, V, K] and the blocks int32 [N, T] of each way, whose first holds the old state."""

    def __init__(self, problem: Problem) -> None:
        s = problem.shape
        self.problem = problem
        count = problem.ways * s.N * s.T
        self.pool = torch.zeros(1 + count, s.HV, V, K, dtype=problem.pool.dtype, device=problem.device)
        numbers = torch.arange(1, 1 + count, dtype=torch.int32, device=problem.device)
        self.indices = [part.clone() for part in numbers.view(problem.ways, s.N, s.T)]
        for way, blocks in enumerate(self.indices):
            self.pool[blocks[:, 0].long()] = problem.pool[problem.indices[way].long()]
        self.accepted = torch.ones(s.N, dtype=torch.int32, device=problem.device)

    def reset(self) -> None:
        self.problem.reset()
        self.pool[self.indices[0].long()] = torch.nan
        self.pool[self.indices[0][:, 0].long()] = self.problem.initial

    def states(self) -> Tensor:
        """[N, T, HV, V, K] of way 0."""
        return self.pool[self.indices[0].long()]


class Verify(Entry):
    peer, entry = "vllm", "triton-spec"
    ops = frozenset({"verify-snapshots"})
    note = f"writes the states to its own pool; {DENSE}"

    def bind(self, problem: Problem) -> Bound:
        verify = found.modules("vllm")[0].fused_sigmoid_gating_delta_rule_update
        blocks, dt_bias = Blocks(problem), problem.dt_bias.bfloat16()
        q, k, v = (x[None] for x in problem.dense)
        calls = Calls(
            lambda way: verify(
                A_log=problem.A_log,
                a=problem.a,
                b=problem.b,
                dt_bias=dt_bias,
                q=q,
                k=k,
                v=v,
                initial_state=blocks.pool,
                inplace_final_state=True,
                cu_seqlens=problem.cu_seqlens,
                ssm_state_indices=blocks.indices[way],
                num_accepted_tokens=blocks.accepted,
                use_qk_l2norm_in_kernel=True,
            )
        )
        return Bound(
            calls,
            lambda: {"o": per_request(problem, calls.returned[0][0]), "states": blocks.states()},
            blocks.reset,
        )


class PackedDecode(sglang.PackedDecode):
    """The same contract as SGLang's function of that name."""

    peer = "vllm"


class FusedMtp(Entry):
    """The compiled operator of an installed vLLM: the recurrence together with the gated RMSNorm that follows it."""

    peer, entry = "vllm", "cuda-fused-mtp"
    ops = frozenset({"verify-snapshots"})
    note = "includes the gated RMSNorm, so only its states are compared; writes them to its own pool"

    def absent(self) -> str:
        """Its own package must be installed: unpacked files do not contain compiled operators."""
        if not found.is_installed("vllm"):
            return f"not here: a compiled operator, install vllm=={PEERS['vllm'].version}"
        if reason := found.absence("vllm"):
            return reason
        try:
            importlib.import_module("vllm._custom_ops")
        except Exception as error:
            return f"not here: vllm._custom_ops does not import: {type(error).__name__}: {error}"
        if not hasattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp"):
            return "not here: this vllm was built without fused_gdn_decode_post_conv_mtp"
        return ""

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=tuple(range(1, 9)), pool=("bf16", "fp32"))
        verify = importlib.import_module("vllm._custom_ops").fused_gdn_decode_post_conv_mtp
        blocks, dt_bias = Blocks(problem), problem.dt_bias.bfloat16()
        gate = torch.ones_like(problem.o)
        norm = torch.ones(V, dtype=torch.bfloat16, device=problem.device)

        def launch(way: int) -> None:
            verify(
                mixed_qkv=problem.mixed,
                a=problem.a,
                b=problem.b,
                A_log=problem.A_log,
                dt_bias=dt_bias,
                state_indices=blocks.indices[way],
                cu_seqlens=problem.cu_seqlens,
                num_accepted_tokens=blocks.accepted,
                state=blocks.pool,
                output_gate=gate,
                norm_weight=norm,
                out=problem.o,
                scale=SCALE,
            )

        return Bound(launch, lambda: {"states": blocks.states()}, blocks.reset)


ENTRIES: tuple[type[Entry], ...] = (Verify, PackedDecode, FusedMtp)
