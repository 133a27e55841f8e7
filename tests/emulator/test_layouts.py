"""A wgmma whose descriptors, or an mma.sync whose fragments, do not describe the data gives wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import EmulatorError, load
from tests.emulator.programs import fragments, gemm
from tests.emulator.programs.edit import replace

pytestmark = pytest.mark.criterion("0.23")

BAD_LAYOUTS = {
    "64-byte swizzle of A": replace(r"descriptor<1, 1, 64>\(desc_a", "descriptor<2, 1, 64>(desc_a"),
    "no swizzle of B": replace(r"descriptor<1, 1, 64>\(desc_b", "descriptor<0, 1, 64>(desc_b"),
    "stride of B": replace(r"descriptor<1, 1, 64>\(desc_b", "descriptor<1, 1, 32>(desc_b"),
    "step along K": replace(r"\(ki & 3\) \* 32", "(ki & 3) * 16"),
    "B read as MN-major": replace(r"64, 32, 16, false, false", "64, 32, 16, false, true"),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_wrong_layout_gives_wrong_numbers(name: str) -> None:
    lowered = lower(Program(gemm.__name__, gemm.Config(64, 32, 128)))
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 128, generator=generator).bfloat16(), torch.randn(32, 128, generator=generator).bfloat16()
    good, bad = torch.zeros(64, 32), torch.zeros(64, 32)
    load(lowered)(a, b, good)
    load(lowered, patch=BAD_LAYOUTS[name])(a, b, bad)
    expected = a.double() @ b.double().T
    assert float((good - expected).norm() / expected.norm()) < 1e-6
    assert not float((bad - expected).norm() / expected.norm()) < 0.1  # NaN counts as wrong


def test_descriptor_outside_shared_memory() -> None:
    lowered = lower(Program(gemm.__name__, gemm.Config(64, 32, 128)))
    kernel = load(lowered, patch=replace(r"descriptor<1, 1, 64>\(desc_a", "descriptor<1, 1, 4096>(desc_a"))
    with pytest.raises(EmulatorError, match="wgmma reads shared memory at byte"):
        kernel(torch.zeros(64, 128).bfloat16(), torch.zeros(32, 128).bfloat16(), torch.zeros(64, 32))


@pytest.mark.parametrize(
    "patch",
    [
        replace(r"\(\(i & 3\) >> 1\) \* 512(.*)\(i >> 2\) \* 8", r"(i >> 2) * 512\1((i & 3) >> 1) * 8"),
        replace(r"(mma_sync<.*a \+ )0\b", r"\g<1>2"),
        replace(r"\(i_2 >> 1\)", "(i_2 & 1)"),
    ],
    ids=["rows and columns of A", "first register of A", "rows of C"],
)
def test_wrong_fragment_gives_wrong_numbers(patch: Callable[[str], str]) -> None:
    lowered = lower(Program(fragments.__name__, fragments.Config()))
    a, b = torch.randint(-8, 9, (16, 64)).bfloat16(), torch.randint(-8, 9, (8, 64)).bfloat16()
    good, bad = torch.zeros(16, 8), torch.zeros(16, 8)
    load(lowered)(a, b, good)
    load(lowered, patch=patch)(a, b, bad)
    assert torch.equal(good, a.float() @ b.float().T)
    assert not torch.equal(bad, good)
