"""A dropped barrier and a write conflict between blocks are reported as data races."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import sanitize
from tests.emulator.programs import blocks, bulk, gemm, reductions, staged
from tests.emulator.programs.edit import replace

criterion = pytest.mark.criterion("0.21")

DROP_BARRIER = replace(r"__syncthreads\(\);", ";")


@criterion
@pytest.mark.parametrize("asynchronous", [False, True], ids=["stores", "cp.async"])
def test_dropped_barrier_between_stores_and_loads(asynchronous: bool) -> None:
    lowered = lower(Program(staged.__name__, staged.Config(asynchronous=asynchronous)))
    args = [torch.randn(1, 16, 128).bfloat16(), torch.zeros(1, 16, 128)]
    report = sanitize.run(lowered, args, "thread", patch=DROP_BARRIER)
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text


@criterion
@pytest.mark.parametrize("config", [gemm.Config(64, 32, 128), gemm.Config(32, 32, 128)], ids=["wgmma", "ldmatrix"])
def test_dropped_barrier_before_a_tensor_core_read(config: gemm.Config) -> None:
    """The reads that the tensor cores make count as the program's reads."""
    lowered = lower(Program(gemm.__name__, config))
    args = [torch.ones(config.M, config.K).bfloat16(), torch.ones(config.N, config.K).bfloat16()]
    report = sanitize.run(lowered, [*args, torch.zeros(config.M, config.N)], "thread", patch=DROP_BARRIER)
    assert any("data race" in f for f in report.findings), report.text


@criterion
def test_dropped_barrier_after_a_scan() -> None:
    """A shuffle orders the lanes of a warp in time but is no memory barrier."""
    lowered = lower(Program(reductions.__name__, reductions.Config()))
    args = [torch.zeros(8, 128), torch.zeros(8), torch.zeros(1), torch.zeros(8, 128)]
    patch = replace(r"(CumSum2D.*\n\s*)__syncthreads\(\);", r"\1")
    report = sanitize.run(lowered, args, "thread", patch=patch)
    assert any("data race" in f for f in report.findings), report.text


@criterion
@pytest.mark.parametrize(
    "patch",
    [
        replace(r"(tma_store_wait<1, true>\(\);\s*\}\s*)__syncwarp\(\);", r"\1"),
        replace(r"(fence_proxy_async\(\);\s*)__syncwarp\(\);", r"\1"),
        replace(r"(if [^\n]*\{\s*tl::tma_store_wait<1, true>\(\);\s*\})\s*(__syncwarp\(\);)", r"\2 \1"),
    ],
    ids=["before reuse", "before the store", "wait after the barrier"],
)
def test_unordered_source_of_a_bulk_store(patch: Callable[[str], str]) -> None:
    """A bulk store reads from its issue to its wait, as a read of the lane that issues it."""
    lowered = lower(Program(bulk.__name__, bulk.Config(warps=1)))
    x = torch.randn(1, 1, 6, 64)
    report = sanitize.run(lowered, [x, torch.zeros_like(x)], "thread", patch=patch)
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text


@criterion
def test_two_blocks_that_store_one_row_in_bulk() -> None:
    lowered = lower(Program(bulk.__name__, bulk.Config(warps=1)))
    x = torch.randn(2, 1, 6, 64)
    patch = replace(r"(&\(y\[.*?)\(int\)blockIdx\.x", r"\g<1>0")
    report = sanitize.run(lowered, [x, torch.zeros_like(x)], "thread", patch=patch)
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text


def blocks_race(config: blocks.Config) -> sanitize.Report:
    lowered = lower(Program(blocks.__name__, config))
    return sanitize.run(lowered, [torch.zeros(config.rows, 32, dtype=torch.int32)], "thread")


@criterion
def test_two_blocks_write_one_output() -> None:
    report = blocks_race(blocks.Config(4, rows=1))
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text


@criterion
def test_two_distant_blocks_write_one_output() -> None:
    """20 blocks, that is 640 fibers, apart."""
    report = blocks_race(blocks.Config(21, rows=20))
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text


@criterion
@pytest.mark.parametrize("writers", ["threadIdx.x == 0", "threadIdx.x == 31"])
def test_barrier_does_not_order_two_blocks(writers: str) -> None:
    assert_race_between_barriers(f"if ({writers}) y[64] = 1; __syncthreads();", blocks.Config(2, rows=3))


@criterion
@pytest.mark.parametrize("writers", ["threadIdx.x < 2", "threadIdx.x > 29", "threadIdx.x % 31 == 0"])
def test_race_between_two_barriers(writers: str) -> None:
    """Some threads reach the second barrier before others have left the first."""
    assert_race_between_barriers(f"if ({writers}) y[0] = 1;", blocks.Config(1, rows=1))


def assert_race_between_barriers(statement: str, config: blocks.Config) -> None:
    lowered = lower(Program(blocks.__name__, config))
    patch = replace(r"(\) \{\n)", rf"\1  __syncthreads();\n  {statement}\n  __syncthreads();\n")
    report = sanitize.run(lowered, [torch.zeros(config.rows, 32, dtype=torch.int32)], "thread", patch=patch)
    assert any("data race" in f and "kernel.cu" in f for f in report.findings), report.text
