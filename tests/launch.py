"""Runs a program on CPU tensors by executing its generated SM90 CUDA."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime
from tests.emulator import EmulatedKernel, load


@functools.cache
def emulated(program: runtime.Program) -> EmulatedKernel:
    return load(runtime.lower(program))


def emulate(program: runtime.Program, *args: Any) -> None:
    """The CPU launcher of the suite: same program, same arguments as on a GPU."""
    emulated(program)(*args)


def mutate(monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> None:
    """The launches that follow run kernels in whose generated source `pattern`, which has to be there, is replaced."""

    def patch(source: str) -> str:
        changed, count = re.subn(pattern, replacement, source)
        assert count, f"the pattern {pattern!r} is not in the generated source"
        return changed

    monkeypatch.setattr(
        runtime, "cpu_launcher", lambda program, *args: load(runtime.lower(program), patch=patch)(*args)
    )


def refuses(check: Callable[[], object]) -> bool:
    """Whether `check` fails."""
    try:
        check()
    except (AssertionError, IndexError, RuntimeError):
        return True
    return False


def allocations(call: Callable[[], object]) -> int:
    """CUDA allocations that torch makes during `call`; synchronising with the device in it raises."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[runtime.Program, tuple[Any, ...]]]:
    """The launches that follow, program and arguments, as they happen; all of them run."""
    launched: list[tuple[runtime.Program, tuple[Any, ...]]] = []
    real = runtime.launch

    def launch(program: runtime.Program, *args: Any) -> None:
        launched.append((program, args))
        real(program, *args)

    monkeypatch.setattr(runtime, "launch", launch)
    return launched
