"""Runs FlashInfer's unmodified wrappers on kernels that were compiled ahead of time (see flashinfer_build.py).

The wrappers compile through CuTe DSL. Here `cutlass` is an inert package that only has the names they mention, and
whatever they would compile is looked up in a library by the same key under which the build exported it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.implementation import Unsupported

LIBRARY, INDEX, SITE = "libflashinfer_gdn_sm90a.so", "index.json", "site"
Kernel = Callable[..., Any]
Find = Callable[[str], Kernel]
INERT = (
    *("cutlass", "cutlass.cute", "cutlass.cute.runtime", "cutlass.cute.arch", "cutlass.cute.nvgpu"),
    *("cutlass.cute.nvgpu.warp", "cutlass.cute.typing", "cutlass.utils", "cutlass._mlir", "cutlass._mlir.dialects"),
    "cutlass.cutlass_dsl",
)


class Library:
    """The compiled kernels of a folder that `nox -s peers` made: `find(key)` gives a function of tensors."""

    def __init__(self, folder: Path) -> None:
        for needed in (folder / LIBRARY, folder / INDEX, folder / SITE / "tvm_ffi"):
            if not needed.exists():
                raise RuntimeError(f"{needed} is missing: run nox -s peers -- flashinfer")
        self.index: dict[str, str] = json.loads((folder / INDEX).read_text())
        sys.path.insert(0, str(folder / SITE))
        try:
            tvm_ffi = importlib.import_module("tvm_ffi")
        except ImportError as error:
            python = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(
                f"{folder / SITE} does not import in Python {python} ({error}): run "
                f"nox -s peers -- flashinfer --python {python}"
            ) from error
        try:
            ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
            self.module = tvm_ffi.load_module(str(folder / LIBRARY))
        except OSError as error:
            raise RuntimeError(f"{LIBRARY} needs the CUDA 13 runtime, as torch for CUDA 13 has it: {error}") from error

    def find(self, key: str) -> Kernel:
        """Raises Unsupported if that kernel was not built."""
        return self.module.get_function(symbol_of(self.index, key))


def symbol_of(index: dict[str, str], key: str) -> str:
    """Raises Unsupported if the key is not in the index."""
    if key not in index:
        raise Unsupported(
            f"this shape was not compiled ahead of time ({key[:60]}...): run nox -s peers -- flashinfer "
            "--heads H/HV --requests N --tokens T"
        )
    return index[key]


def kernel_key(kernel: object, arguments: tuple[Any, ...]) -> str:
    """Of a WY kernel, whose wrapper has no name for it: its class, its options and the head counts."""
    numbers = [x for x in arguments if type(x) is int][:3]
    return f"wy/{type(kernel).__name__}/{sorted(vars(kernel).items())}/{numbers}"


class _Name:
    """Stands for anything in cutlass: can be called, indexed, multiplied, used as a decorator or an annotation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> Any:
        return self

    def __mul__(self, other: object) -> Any:
        return self

    __rmul__ = __add__ = __radd__ = __mul__


class _Inert(types.ModuleType):
    """A module in which every name exists."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()


class _Marked:
    """What from_dlpack returns: the tensor itself, whatever is said about its layout."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def mark_layout_dynamic(self, *args: Any, **kwargs: Any) -> _Marked:
        return self

    def mark_compact_shape_dynamic(self, *args: Any, **kwargs: Any) -> _Marked:
        return self


class _Compile:
    """cute.compile and cute.compile[options]: finds instead of compiling."""

    def __init__(self, find: Find) -> None:
        self.find = find

    def __getitem__(self, options: object) -> _Compile:
        return self

    def __call__(self, kernel: object, *arguments: Any) -> Kernel:
        compiled = self.find(kernel_key(kernel, arguments))

        def call(*values: Any) -> Any:
            return compiled(*(x.tensor if isinstance(x, _Marked) else x for x in values))

        return call


def stand_ins(find: Find) -> dict[str, dict[str, Any]]:
    """Makes `cutlass` inert in this process and returns what else the wrappers import, by module name.

    Raises RuntimeError if a real cutlass is loaded.
    """
    if not isinstance(sys.modules.get("cutlass", _Inert("cutlass")), _Inert):
        raise RuntimeError("cutlass is already imported in this process: use another one")
    modules = {name: _Inert(name) for name in INERT}
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    vars(modules["cutlass"])["const_expr"] = lambda value: value
    vars(modules["cutlass.cute"])["compile"] = _Compile(find)
    vars(modules["cutlass.cute.runtime"])["from_dlpack"] = lambda tensor, *args, **kwargs: _Marked(tensor)
    # the wrappers ask CuTeDSL for the architecture it compiles for; without it they take the device's
    vars(modules["cutlass.cutlass_dsl"])["CuTeDSL"] = None

    def build_and_load(module: str, name: str, compile_it: object, files: object = (), **kwargs: Any) -> Kernel:
        return find(f"{module}/{name}")

    return {
        "flashinfer.jit": {},
        "flashinfer.jit.cute_dsl_core": {"build_and_load_cute_dsl_kernel": build_and_load},
    }
