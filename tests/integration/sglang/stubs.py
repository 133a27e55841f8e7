"""SGLang's Python files without what they need: `importable()` puts the wheel on the path, with stand-ins behind it.

A stand-in is made only for a module that SGLang (or another stand-in) asks for and that is not installed, so real
packages, Triton above all, stay real where they are. Only for a process of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import unittest.mock
from pathlib import Path
from typing import Any

from tests.integration import frameworks


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock(name=name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Anything(metaclass=_Meta):
    """What a stand-in has for a class: it can be a base, be instantiated with anything, and stand in annotations."""

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __init_subclass__(cls, **named: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *given: Any) -> Any:
        return {"type": "any"}

    def __call__(self, function: Any = None, *args: Any, **named: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock(name=name)


class _Struct:
    """msgspec.Struct as far as SGLang needs it to be real."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **named: Any) -> None:
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name)
            if isinstance(default, (list, dict, set)):
                setattr(cls, name, dataclasses.field(default_factory=functools.partial(copy.copy, default)))
        dataclasses.dataclass(kw_only=kw_only, unsafe_hash=frozen)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[attr-defined, arg-type]


def _field(default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, **named: Any) -> Any:
    return dataclasses.field(default=default, default_factory=default_factory)


#: what SGLang looks into while it is imported
REAL: dict[tuple[str, str], Any] = {
    ("msgspec", "Struct"): _Struct,
    ("msgspec", "field"): _field,
    ("dill", "dumps"): lambda value: b"",
    ("triton", "runtime"): None,  # SGLang takes the error for "no device" and says cpu
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if (self.__name__, name) in REAL:
            value = REAL[self.__name__, name]
        elif name[0].isupper():
            value = type(name, (_Anything,), {})
        else:
            value = unittest.mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.tops = {"sglang"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top == "sglang" or (top not in self.tops and not self.asked_for()):
            return None
        self.tops.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def asked_for(self) -> bool:
        frame: types.FrameType | None = sys._getframe(2)
        while frame and (
            "importlib" in frame.f_code.co_filename or frame.f_code.co_name in ("find_spec", "_find_spec")
        ):
            frame = frame.f_back
        return bool(frame) and frame.f_globals.get("__name__", "").partition(".")[0] in self.tops  # type: ignore[union-attr]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__dict__["__version__"] = "99.0.0"  # new enough for whoever asks
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def importable() -> None:
    """Make `import sglang` find the wheel's files. Raises frameworks.Absent."""
    place = frameworks.folder("sglang-0.5.23")
    importlib.import_module("torch._inductor.compile_fx")  # before it can take a stand-in for Triton
    sys.path.insert(1, str(place))
    sys.meta_path.append(_Finder())
    # The wheel's C++ sources are not unpacked, and these paths are all that is wanted of them.
    paths: Any = types.ModuleType("sglang.kernels.jit.utils.compile.paths")
    paths.KERNEL_PATH = Path(place)
    paths.DEFAULT_INCLUDE, paths.DEFAULT_CFLAGS, paths.DEFAULT_LDFLAGS = [], [], []
    sys.modules[paths.__name__] = paths
