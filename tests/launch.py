"""Runs a program on CPU tensors by executing its generated SM90 CUDA."""

from __future__ import annotations

import functools
from typing import Any

from kernels import runtime
from tests.emulator import EmulatedKernel, load


@functools.cache
def emulated(program: runtime.Program) -> EmulatedKernel:
    return load(runtime.lower(program))


def emulate(program: runtime.Program, *args: Any) -> None:
    """The CPU launcher of the suite: same program, same arguments as on a GPU."""
    emulated(program)(*args)
