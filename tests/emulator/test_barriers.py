"""Divergent barriers and deadlocks are errors with a message, and the process goes on."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import EmulatorError, load
from tests.emulator.programs import gemm, reductions, staged
from tests.emulator.programs.edit import replace

pytestmark = pytest.mark.criterion("0.24")

BARRIER = r"__syncthreads\(\);"
DIVERGENT = "if (threadIdx.x < 64) __syncthreads();\nelse __syncthreads();"


def staged_args() -> list[torch.Tensor]:
    return [torch.randn(1, 16, 128).bfloat16(), torch.zeros(1, 16, 128)]


def test_divergent_barrier() -> None:
    lowered = lower(Program(staged.__name__, staged.Config()))
    kernel = load(lowered, patch=replace(BARRIER, DIVERGENT))
    with pytest.raises(EmulatorError, match=r"divergent barrier: __syncthreads at line \d+ meets") as error:
        kernel(*staged_args())
    lines = [int(n) for n in re.findall(r"line (\d+)", str(error.value))]
    assert abs(lines[0] - lines[1]) == 1
    load(lowered)(*staged_args())


def test_barrier_that_some_threads_skip() -> None:
    lowered = lower(Program(staged.__name__, staged.Config()))
    kernel = load(lowered, patch=replace(BARRIER, "if (threadIdx.x < 96) __syncthreads();"))
    with pytest.raises(
        EmulatorError, match=r"deadlock: 32 of 128 threads have exited; thread 0 waits in __syncthreads"
    ):
        kernel(*staged_args())


def test_shuffle_that_some_lanes_skip() -> None:
    lowered = lower(Program(reductions.__name__, reductions.Config()))
    patch = replace(r"(row\[i_1\] = tl::AllReduce)", r"if (threadIdx.x % 32 < 16) \1")
    with pytest.raises(EmulatorError, match=r"deadlock|divergent"):
        load(lowered, patch=patch)(torch.zeros(8, 128), torch.zeros(8), torch.zeros(1), torch.zeros(8, 128))


def test_wgmma_that_one_warp_skips() -> None:
    lowered = lower(Program(gemm.__name__, gemm.Config(64, 32, 128)))
    patch = replace(r"(tl::warpgroup_wait<0>\(\);)", r"if (threadIdx.x < 96) \1")
    with pytest.raises(EmulatorError, match=r"deadlock: .*wgmma\.wait_group"):
        load(lowered, patch=patch)(
            torch.zeros(64, 128).bfloat16(), torch.zeros(32, 128).bfloat16(), torch.zeros(64, 32)
        )
