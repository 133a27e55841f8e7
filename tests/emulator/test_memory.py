"""Accesses outside a tensor and misaligned vector accesses are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import EmulatorError, load, sanitize
from tests.emulator.programs import blocks, bulk, staged
from tests.emulator.programs.edit import replace

pytestmark = pytest.mark.criterion("0.22")


def test_store_past_the_end_of_a_tensor() -> None:
    lowered = lower(Program(blocks.__name__, blocks.Config()))
    args = [torch.zeros(4, 32, dtype=torch.int32)]
    report = sanitize.run(lowered, args, "address", patch=replace(r"\* 32\)", "* 33)"))
    assert any("heap-buffer-overflow" in f and "kernel.cu" in f for f in report.findings), report.text


def test_store_to_an_unmapped_address() -> None:
    """The sanitized program does not survive it; the finding is reported all the same."""
    lowered = lower(Program(blocks.__name__, blocks.Config()))
    args = [torch.zeros(4, 32, dtype=torch.int32)]
    report = sanitize.run(lowered, args, "address", patch=replace(r"\* 32\)", "* (int64_t)1 << 40)"))
    assert any(f.startswith("SEGV at kernel.cu") for f in report.findings), report.text
    assert report.outputs == []


def test_asynchronous_copy_from_past_the_end_of_a_tensor() -> None:
    lowered = lower(Program(staged.__name__, staged.Config(asynchronous=True)))
    args = [torch.zeros(1, 16, 128).bfloat16(), torch.zeros(1, 16, 128)]
    report = sanitize.run(lowered, args, "address", patch=replace(r"\(int64_t\)1024", "(int64_t)1032"))
    assert any("heap-buffer-overflow" in f and "kernel.cu" in f for f in report.findings), report.text


def test_misaligned_vector_access() -> None:
    """A tensor that starts at an odd element, read by 16-byte loads."""
    lowered = lower(Program(staged.__name__, staged.Config()))
    x = torch.zeros(2049).bfloat16()[1:].view(1, 16, 128)
    report = sanitize.run(lowered, [x, torch.zeros(1, 16, 128)], "undefined")
    assert any("misaligned address" in f for f in report.findings), report.text


def test_misaligned_asynchronous_copy() -> None:
    lowered = lower(Program(staged.__name__, staged.Config(asynchronous=True)))
    x = torch.zeros(2049).bfloat16()[1:].view(1, 16, 128)
    with pytest.raises(EmulatorError, match=r"cp\.async at line \d+: misaligned"):
        load(lowered)(x, torch.zeros(1, 16, 128))


@pytest.mark.parametrize(
    "patch",
    [
        replace(r"(tma_store<.*&\(rows\[)", r"\1 1 + "),
        replace(r"(tma_store<.*&\(y\[)", r"\1 1 + "),
        replace(r"(tma_store<.*), 256\)", r"\1, 248)"),
    ],
    ids=["source", "target", "size"],
)
def test_misaligned_bulk_store(patch: Callable[[str], str]) -> None:
    lowered = lower(Program(bulk.__name__, bulk.Config()))
    x = torch.zeros(1, 2, 6, 64)
    with pytest.raises(EmulatorError, match=r"bulk store at line \d+: .* multiples of 16 bytes"):
        load(lowered, patch=patch)(x, torch.zeros_like(x))


def test_bulk_store_from_global_memory() -> None:
    lowered = lower(Program(bulk.__name__, bulk.Config()))
    x = torch.zeros(1, 2, 6, 64)
    with pytest.raises(EmulatorError, match=r"bulk store at line \d+: the source is not in shared memory"):
        load(lowered, patch=replace(r"(tma_store<.*&\()rows(\[)", r"\1y\2"))(x, torch.zeros_like(x))


def test_bulk_store_past_the_end_of_a_tensor() -> None:
    lowered = lower(Program(bulk.__name__, bulk.Config()))
    x = torch.zeros(1, 2, 6, 64)
    patch = replace(r"(tma_store<.*&\(y\[)", r"\1 4 + ")
    report = sanitize.run(lowered, [x, torch.zeros_like(x)], "address", patch=patch)
    assert any("heap-buffer-overflow" in f and "kernel.cu" in f for f in report.findings), report.text


def test_wild_pointer_ends_the_launch_and_not_the_process() -> None:
    lowered = lower(Program(blocks.__name__, blocks.Config()))
    kernel = load(lowered, patch=replace(r"\* 32\)", "* (int64_t)1 << 50)"))
    with pytest.raises(EmulatorError, match="SIGSEGV"):
        kernel(torch.zeros(4, 32, dtype=torch.int32))
