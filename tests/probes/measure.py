"""Data and error measures of the probes."""

from __future__ import annotations

import torch

#: An fp32 sum of products that are exact in fp32, in the tensor cores' 16-term steps for K = 128. Each of the eight
#: steps may lose one unit of its running sum; the cores truncate, so the unit is 2^-23 and not half of it. Twice that.
FP32_SUM = 2 * 8 * 2.0**-23


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; infinite if `got` is not finite."""
    got, want = got.double().cpu(), want.double().cpu()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - want).norm() / want.norm())


def mismatches(got: torch.Tensor, want: torch.Tensor) -> int:
    """Number of elements that differ; a NaN differs from everything."""
    return int((got.cpu() != want.cpu().to(got.dtype)).sum())


def integers(*shape: int, low: int = -8, high: int = 9, seed: int = 0) -> torch.Tensor:
    """Small whole numbers in fp32: exact in bf16, and so are the sums of their products in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).float()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal fp32 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
