"""Inputs of a dense recurrent call with guarded buffers, its fp64 result, and the comparison between the two."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.decode import dense
from reference.recurrence import Recurrence, recurrent
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.verify.cases import Buffer, relative_l2


@dataclasses.dataclass
class DenseCase:
    """One call of the low-level function: inputs, guarded buffers filled with NaN, options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    o: Buffer
    initial: Buffer | None
    final: Buffer | None
    seqlens: Tensor | None
    cu_seqlens: Tensor | None
    options: dict[str, Any]

    @property
    def v_first(self) -> bool:
        return bool(self.options.get("state_v_first", False))

    @property
    def requests(self) -> list[tuple[int, slice]]:
        """Batch row and tokens of each request."""
        B, T = self.q.shape[:2]
        if self.cu_seqlens is not None:
            starts = self.cu_seqlens.tolist()
            return [(0, slice(a, b)) for a, b in itertools.pairwise(starts)]
        lengths = [T] * B if self.seqlens is None else [min(max(n, 0), T) for n in self.seqlens.tolist()]
        return [(row, slice(0, length)) for row, length in enumerate(lengths)]

    def run(self) -> None:
        initial, final = (None if x is None else x.view for x in (self.initial, self.final))
        dense.fused_recurrent_gdr_fwd(
            self.q, self.k, self.v, self.g, self.beta, self.o.view, initial, final, self.seqlens, self.cu_seqlens,
            **self.options,
        )  # fmt: skip

    def run_public(self, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The same call of the allocating function; o and the final state it returns."""
        return dense.recurrent_gated_delta_rule(
            self.q, self.k, self.v, self.g, self.beta, seqlens=self.seqlens, cu_seqlens=self.cu_seqlens,
            initial_state=None if self.initial is None else self.initial.view,
            output_final_state=self.final is not None, **self.options | options,
        )  # fmt: skip

    def expected(self, recurrence: Recurrence = recurrent) -> tuple[Tensor, Tensor]:
        """o and the final states [N, HV, K, V] or [N, HV, V, K] in fp64."""
        (B, T, HV, V), K = self.v.shape, self.q.shape[3]
        o = torch.zeros(B, T, HV, V, dtype=torch.float64, device=self.v.device)
        S = torch.zeros(len(self.requests), HV, V, K, dtype=torch.float64, device=self.v.device)
        if self.initial is not None:
            S.copy_(self.initial.view if self.v_first else self.initial.view.mT)
        norm = self.options.get("use_qk_l2norm_in_kernel", False)
        for n, (row, tokens) in enumerate(self.requests):
            if tokens.stop > tokens.start:
                q, k, v, g, beta = (x[row, tokens].double() for x in (self.q, self.k, self.v, self.g, self.beta))
                scale = self.options.get("scale")
                out, states = recurrence(q, k, v, g, beta, S[n].clone(), scale=scale, use_qk_l2norm=norm)
                o[row, tokens], S[n] = out, states[-1]
        return o, S if self.v_first else S.mT

    def fill(self, recurrence: Recurrence) -> None:
        """Leave what `recurrence` computes in the buffers, rounded as they store it."""
        o, S = self.expected(recurrence)
        self.o.view.copy_(o)
        if self.final is not None:
            self.final.view.copy_(S)


def make(
    B: int = 2,
    T: int = 6,
    H: int = 2,
    HV: int = 4,
    *,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    initial: bool = True,
    final: bool = True,
    seqlens: Sequence[int] | None = None,
    packed: Sequence[int] | None = None,
    tail: int = 0,
    index: torch.dtype = torch.int32,
    pitched: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    use_qk_l2norm_in_kernel: bool = True,
    **options: Any,
) -> DenseCase:
    """Random inputs. `packed`: lengths of packed requests, with `tail` tokens of none after them, instead of B and T;
    `pitched`: gaps between tokens, batch rows, heads and states, and strided gates."""
    rng = torch.Generator().manual_seed(seed)
    if packed is not None:
        B, T = 1, sum(packed) + tail
    N = B if packed is None else len(packed)
    gap = 8 if pitched else 0

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    mixed = normal(B, T, 2 * H * K + HV * V + gap)
    q, k, v = (
        mixed[..., start : start + heads * dim].view(B, T, heads, dim)
        for start, heads, dim in ((0, H, K), (H * K, H, K), (2 * H * K, HV, V))
    )
    if not use_qk_l2norm_in_kernel:
        k.mul_(0.7 * K**-0.5)  # near unit length, else the recurrence explodes
    gates = torch.rand(B, T, HV, 2, generator=rng).to(device)
    gates[..., 0] = -2 * gates[..., 0] ** 2
    g, beta = gates[..., 0], gates[..., 1]
    inner = (V, K) if options.get("state_v_first") else (K, V)
    state = normal(N, HV, *inner, dtype=torch.float32) * 0.5
    unset_o = torch.full((B, T, HV, V), torch.nan, dtype=dtype, device=device)
    unset = torch.full((N, HV, *inner), torch.nan, device=device)
    gaps = (12, 4) if pitched else ()
    return DenseCase(
        q, k, v,
        g if pitched else g.contiguous(), beta if pitched else beta.contiguous(),
        Buffer.make(unset_o, (gap, gap, gap)),
        Buffer.make(state, gaps) if initial else None,
        Buffer.make(unset, gaps) if final else None,
        None if seqlens is None else torch.tensor(seqlens, dtype=torch.int32, device=device),
        None if packed is None else torch.tensor([0, *packed]).cumsum(0).to(index).to(device),
        {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **options},
    )  # fmt: skip


def check_values(case: DenseCase, o: Tensor, final: Tensor | None, evidence: Evidence) -> None:
    """Compare results with fp64: o to the rounding of its dtype, states to that of fp32 products and sums."""
    want_o, want_final = case.expected()
    covered = torch.zeros(o.shape[:2], dtype=torch.bool, device=o.device)
    for row, tokens in case.requests:
        covered[row, tokens] = True
    assert not o[~covered].any(), "output rows of no request are not zero"
    assert not o.isnan().any()
    if want_o.any():
        limit = ROUNDING[case.v.dtype]
        evidence.at_most(f"o in {str(o.dtype)[6:]}, relative L2 against fp64", relative_l2(o, want_o), limit)
    else:
        assert not o.any()
    if final is not None and final.numel():
        limit = ROUNDING[torch.float32]
        if want_final.any():
            evidence.at_most("fp32 states, relative L2 against fp64", relative_l2(final, want_final), limit)
        else:
            assert not final.any()
        for n, (_, tokens) in enumerate(case.requests):
            if tokens.stop == tokens.start:
                assert torch.equal(final[n].double(), want_final[n]), "the state of a request without tokens changed"


def check(case: DenseCase, evidence: Evidence) -> None:
    """What the call left in the buffers of `case`, and everything else as it was."""
    check_values(case, case.o.view, None if case.final is None else case.final.view, evidence)
    for buffer in (case.o, case.initial, case.final):
        assert buffer is None or buffer.gaps_intact(), "bytes outside a view changed"
    assert case.initial is None or not case.initial.differs().any(), "the initial state changed"
