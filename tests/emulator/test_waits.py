"""A missing wait or fence of asynchronous work is seen in the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import EmulatorError, load
from tests.emulator.programs import bulk, gemm, staged
from tests.emulator.programs.edit import replace

pytestmark = pytest.mark.criterion("0.25")

Patch = Callable[[str], str]


def staged_result(patch: Patch | None) -> tuple[torch.Tensor, torch.Tensor]:
    lowered = lower(Program(staged.__name__, staged.Config(asynchronous=True)))
    x, y = torch.randn(2, 16, 128).bfloat16(), torch.zeros(2, 16, 128)
    load(lowered, patch=patch)(x, y)
    return y, x.float().flip(1, 2)


def gemm_result(config: gemm.Config, patch: Patch | None) -> tuple[torch.Tensor, torch.Tensor]:
    lowered = lower(Program(gemm.__name__, config))
    a = torch.randint(-4, 5, (config.M, config.K)).bfloat16()
    b = torch.randint(-4, 5, (config.N, config.K)).bfloat16()
    c = torch.zeros(config.M, config.N)
    load(lowered, patch=patch)(a, b, c)
    return c, a.float() @ b.float().T


@pytest.mark.parametrize(
    "patch",
    [replace(r"tl::cp_async_wait<0>\(\);", ";"), replace(r"cp_async_wait<0>", "cp_async_wait<1>")],
    ids=["none", "one group too few"],
)
def test_missing_wait_for_asynchronous_copies(patch: Patch) -> None:
    right, expected = staged_result(None)
    assert torch.equal(right, expected)
    wrong, _ = staged_result(patch)
    assert bool(wrong.isnan().all())


def test_wait_after_the_barrier_is_too_late() -> None:
    """Each thread waits for its own copies only: the barrier has to follow the wait."""
    swap = replace(r"(tl::cp_async_wait<0>\(\);)\s*(__syncthreads\(\);)", r"\2 \1")
    wrong, expected = staged_result(swap)
    assert not torch.equal(wrong, expected)


ONE = gemm.Config(64, 32, 128)
TWO = gemm.Config(64, 32, 128, parts=2)


@pytest.mark.parametrize(
    ("config", "patch"),
    [
        (ONE, replace(r"tl::warpgroup_wait<0>\(\);", ";")),
        (ONE, replace(r"tl::warpgroup_commit_batch\(\);", ";")),
        (TWO, replace(r"tl::wait_wgmma<0>", "tl::wait_wgmma<1>")),
        (ONE, replace(r"tl::fence_proxy_async\(\);", ";", count=0)),
    ],
    ids=["no wait", "no commit", "one group too few", "no proxy fence"],
)
def test_missing_wgmma_synchronisation(config: gemm.Config, patch: Patch) -> None:
    right, expected = gemm_result(config, None)
    assert torch.equal(right, expected)
    wrong, _ = gemm_result(config, patch)
    assert bool(wrong.isnan().all())


def test_operand_overwritten_before_the_wait() -> None:
    """The operands are read at the latest time the device may read them."""
    overwrite = "*(uint4*)((bfloat16_t*)A_sh + threadIdx.x * 8) = make_uint4(0, 0, 0, 0); tl::fence_proxy_async();"
    wrong, expected = gemm_result(ONE, replace(r"(tl::warpgroup_wait<0>\(\);)", rf"{overwrite} \1"))
    assert not torch.equal(wrong, expected)


def test_accumulator_written_before_the_wait() -> None:
    with pytest.raises(EmulatorError, match="wrote accumulator registers of a wgmma in flight"):
        gemm_result(ONE, replace(r"(tl::warpgroup_wait<0>\(\);)", r"acc[0] = 1.0f; \1"))


def test_missing_wgmma_fence() -> None:
    with pytest.raises(EmulatorError, match=r"wgmma at line \d+ without wgmma\.fence"):
        gemm_result(ONE, replace(r"tl::warpgroup_arrive\(\);", ";"))


def bulk_result(patch: Patch | None) -> tuple[torch.Tensor, torch.Tensor]:
    lowered = lower(Program(bulk.__name__, bulk.Config(rows=6)))
    x = torch.randn(2, 2, 6, 64)
    y = torch.zeros_like(x)
    load(lowered, patch=patch)(x, y)
    return y, x.flip(3)


def test_bulk_store_without_proxy_fence() -> None:
    right, expected = bulk_result(None)
    assert torch.equal(right, expected)
    wrong, _ = bulk_result(replace(r"tl::fence_proxy_async\(\);", ";"))
    assert bool(wrong.isnan().all())


@pytest.mark.parametrize(
    "patch",
    [
        replace(r"tl::tma_store_wait<1, true>\(\);", ";"),
        replace(r"tma_store_wait<1, true>", "tma_store_wait<2, true>"),
        replace(r"== 0(\) \{\s*tl::tma_store_wait<1, true>)", r"== 1\1"),
    ],
    ids=["no wait", "one group too few", "wait of another thread"],
)
def test_source_of_a_bulk_store_overwritten(patch: Patch) -> None:
    """Two buffers: every row but the last two is overwritten while its store is in flight."""
    wrong, expected = bulk_result(patch)
    assert bool(wrong[:, :, :4].isnan().all())
    assert torch.equal(wrong[:, :, 4:], expected[:, :, 4:])


def test_bulk_store_before_the_other_lanes_have_written() -> None:
    wrong, expected = bulk_result(replace(r"(fence_proxy_async\(\);\s*)__syncwarp\(\);", r"\1"))
    assert not torch.equal(wrong, expected)


@pytest.mark.parametrize(
    "patch",
    [
        replace(r"tl::tma_store_wait<0, true>\(\);", ";"),
        replace(r"tma_store_wait<0, true>", "tma_store_wait<1, true>"),
        replace(r"== 0(\) \{\s*tl::tma_store_wait<0, true>)", r"== 1\1"),
        replace(r"tl::tma_store_arrive\(\);", ";"),
    ],
    ids=["no wait", "one group too few", "wait of another thread", "no commit"],
)
def test_exit_with_a_bulk_store_in_flight(patch: Patch) -> None:
    with pytest.raises(
        EmulatorError, match=r"thread 0: the thread exits while its bulk store of line \d+ is in flight"
    ):
        bulk_result(patch)
