"""Executes the SM90 CUDA that TileLang generates, on the CPU. README.md says what is exact and what is not modelled.

>>> kernel = load(lower(program))    # kernels.runtime.lower; compiled with g++, cached on disk
>>> kernel(q, k, v, o)               # CPU tensors and scalars in the order of the PrimFunc's parameters
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kernels.runtime import Lowered
from tests.emulator.arguments import Signature
from tests.emulator.build import compile_kernel
from tests.emulator.errors import EmulatorError
from tests.emulator.source import signature

__all__ = ["EmulatedKernel", "EmulatorError", "load"]

#: changes generated source before it is compiled
Patch = Callable[[str], str]


class EmulatedKernel:
    """A compiled kernel, callable on CPU tensors."""

    def __init__(self, lowered: Lowered, patch: Patch | None = None) -> None:
        source = lowered.source if patch is None else patch(lowered.source)
        self.signature = Signature(lowered.prim_func, signature(source, lowered.entry), lowered.extents)
        self.shared_object = compile_kernel(source, lowered.entry)
        self._launch = ctypes.CDLL(str(self.shared_object)).emu_launch
        self._launch.restype = ctypes.c_char_p

    def __call__(self, *args: Any) -> None:
        """Run on `args`, the parameters of the PrimFunc in their order.

        Raises EmulatorError if an argument does not fit, or with the emulator's message if the program deadlocks,
        meets in different barriers, or accesses memory it must not.
        """
        launch = self.signature.bind(args)
        values = [
            ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctype(v) for ctype, v in launch.values
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        message = self._launch((ctypes.c_int * 6)(*launch.extents), addresses)
        if message is not None:
            raise EmulatorError(message.decode(errors="replace"))


def load(lowered: Lowered, *, patch: Patch | None = None) -> EmulatedKernel:
    """Compile `lowered` for the CPU; `patch` edits the generated source first (for negative controls).

    Raises EmulatorError if the source uses an intrinsic that is not emulated, naming it.
    """
    return EmulatedKernel(lowered, patch)
