"""Inputs of a prepass with guarded outputs, its fp64 result, and the comparison between the two.

Errors are counted in u = 2^-24, half a unit in the last place of fp32 at 1. What is allowed:

    g       8 u for exp, log1p and their product, and as many u as |A_log| + |a + dt_bias|: an exponential turns the
            rounding of its argument, which is relative, into a factor
    beta    8 u: an exponential, a sum, a quotient, an exact product
    norms   32 u: 128 products of bf16 are exact in fp32, but their sum is rounded after each of 8 tensor-core products
            (cut off, not to nearest, on a device); the root halves that, and rsqrt adds 2 units in the last place

and the smallest normal number, 2^-126, in place of what is smaller.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels import prepass
from reference import gating
from tests.verify.cases import Buffer

U = 2.0**-24
SMALLEST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max
OUTPUTS = ("g", "beta", "q_inv_norm", "k_inv_norm")


@dataclasses.dataclass
class Case:
    """One call: q, k [NT, H, 128]; a, b [NT, HV]; outputs full of NaN between canaries."""

    q: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    g: Buffer
    beta: Buffer
    q_inv_norm: Buffer
    k_inv_norm: Buffer
    options: dict[str, Any]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.a, self.b, self.A_log, self.dt_bias

    @property
    def outputs(self) -> tuple[Buffer, ...]:
        return self.g, self.beta, self.q_inv_norm, self.k_inv_norm

    def run(self) -> None:
        views = (buffer.view for buffer in self.outputs)
        prepass.fused_recurrent_gdr_verify_prepass(*self.inputs, *views, **self.options)

    def expected(self) -> tuple[Tensor, ...]:
        """g, beta, q_inv_norm, k_inv_norm in fp64."""
        q, k, a, b, A_log, dt_bias = (x.double() for x in self.inputs)
        gates = gating.gates(A_log, a, dt_bias, b, **self.options)
        return *gates, gating.inverse_norm(q), gating.inverse_norm(k)


def make(
    NT: int = 12,
    H: int = 2,
    HV: int = 4,
    *,
    K: int = 128,
    pitched: bool = False,
    gate: torch.dtype = torch.bfloat16,
    bias: torch.dtype = torch.float32,
    out: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Case:
    """Random inputs; q and k are views of one mixed row. `pitched`: a, b strided in both dimensions too."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    mixed = normal(NT, 2 * H * K + 8)
    ba = normal(NT, HV + 1, 2, dtype=gate)[:, :HV]
    shapes = {"g": HV, "beta": HV, "q_inv_norm": H, "k_inv_norm": H}
    buffers = {
        name: Buffer.make(torch.full((NT, heads), torch.nan, dtype=out, device=device))
        for name, heads in shapes.items()
    }
    return Case(
        q=mixed[:, : H * K].view(NT, H, K),
        k=mixed[:, H * K : 2 * H * K].view(NT, H, K),
        a=ba[..., 0] if pitched else ba[..., 0].contiguous(),
        b=ba[..., 1] if pitched else ba[..., 1].contiguous(),
        A_log=(torch.rand(HV, generator=rng) * 2).to(device),
        dt_bias=normal(HV, dtype=bias),
        options=options,
        **buffers,
    )


def allowed(case: Case) -> tuple[Tensor, ...]:
    """Of each output, how many u its relative error may be."""
    x = case.a.double() + case.dt_bias.double()
    eight, thirty_two = (torch.tensor(units, dtype=torch.float64, device=x.device) for units in (8, 32))
    return 8 + case.A_log.double().abs() + x.abs(), eight, thirty_two, thirty_two


def check(case: Case, evidence: Any, kind: str = "") -> None:
    """Compare what the call left with fp64, as a share of what is allowed; bytes around the outputs did not change."""
    for name, buffer, want, units in zip(OUTPUTS, case.outputs, case.expected(), allowed(case), strict=True):
        got = buffer.view.double()
        assert buffer.gaps_intact(), f"bytes outside {name} changed"
        assert not got.isnan().any(), f"{name} has NaN, or was not written"
        finite = want.abs() <= LARGEST
        if name == "g":  # -inf where exp(A_log) alone overflows is documented: the decay is zero either way
            saturated = got.isinf() & (case.A_log.double() > 88.7) & (want < -1e3)
            assert (got[~finite] == -torch.inf).all(), "g is beyond fp32, must be -inf"
            finite &= ~saturated
        error = (got - want).abs() / (units * U * want.abs() + SMALLEST)
        evidence.at_most(f"{name}{kind}, error as a share of what is allowed", error[finite].max().item(), 1)
