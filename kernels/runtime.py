"""Compile or load a TileLang program once, then launch it with no work left per call.

A *program* is a module that offers `build(config) -> PrimFunc`, a frozen dataclass `Config` with the static
configuration, and `PASS_CONFIGS`. Its label, for example ``probes.outer_product(BV=64, K=128)``, is the key
under which the sha256 of its generated CUDA appears in every recorded result, and is enough to build it again.

Nothing here touches a device, the environment or TileLang at import time.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TARGET: Mapping[str, str] = {"kind": "cuda", "arch": "sm_90a"}

#: label -> sha256 of the generated CUDA, for every program lowered in this process
SOURCES: dict[str, str] = {}

#: Runs a program on CPU tensors. None (the normal state): the public API computes the reference instead.
#: The test-suite installs the emulator here, so that api, plan and program run without a GPU.
cpu_launcher: Callable[..., None] | None = None

#: Directory that keeps generated sources between processes; None keeps none. The test-suite sets it.
lowered_cache: Path | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """One TileLang program with its static configuration (an instance of ``<module>.Config``)."""

    module: str
    config: Any

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.module, self.config))

    def __hash__(self) -> int:
        """Computed once: every launch looks its program up."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.module, self.config)  # without the hash, which is another one in another process

    @property
    def label(self) -> str:
        fields = dataclasses.fields(self.config)
        return f"{self.module}({', '.join(f'{f.name}={getattr(self.config, f.name)!r}' for f in fields)})"

    @classmethod
    def from_label(cls, label: str) -> Program:
        """The inverse of `label`. Raises ValueError for text that is not a label, or names no such module or field."""
        module, values = _parse_label(label)
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists and misses one of its own imports
            raise ValueError(f"{label!r}: there is no module {module}") from error
        if not hasattr(found, "Config"):
            raise ValueError(f"{label!r}: {module} is not a program, it has no Config")
        try:
            return cls(module, found.Config(**values))
        except TypeError as error:
            raise ValueError(f"{label!r} does not fit {module}.Config: {error}") from error

    def build(self) -> Any:
        return importlib.import_module(self.module).build(self.config)

    @property
    def pass_configs(self) -> dict[str, Any]:
        return dict(importlib.import_module(self.module).PASS_CONFIGS)


def _parse_label(label: str) -> tuple[str, dict[str, Any]]:
    """The module and the fields that a label names; nothing but literals is evaluated."""
    match = re.fullmatch(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))", label)
    try:
        call = ast.parse(f"config{match[2]}" if match else "", mode="eval").body
        if match and isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            values = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
            if "**" not in values and len(values) == len(call.keywords):
                return match[1], values
    except (SyntaxError, TypeError, ValueError):
        pass
    raise ValueError(f"not a program label: {label!r}; expected 'module(field=literal, ...)'")


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Generated SM90 CUDA of a program: needs neither nvcc nor a device."""

    program: Program
    prim_func: Any
    source: str
    sha256: str
    entry: str  # name of the __global__ function
    extents: Mapping[str, str]  # "blockIdx.x" ... "threadIdx.z" -> integer or expression of symbolic sizes


@functools.cache
def lower(program: Program) -> Lowered:
    """Generate the CUDA source of `program` for sm_90a: seconds, or from `lowered_cache`; once per process."""
    prim_func = program.build()
    path = lowered_cache / f"{_key(program, prim_func)}.json" if lowered_cache is not None else None
    cached = _read_cache(path) if path is not None else None
    source, entry, extents = cached or _generate(program, prim_func)
    if path is not None and cached is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps([source, entry, extents]))
        scratch.replace(path)
    return Lowered(program, prim_func, source, _note(program, source), entry, extents)


def _generate(program: Program, prim_func: Any) -> tuple[str, str, dict[str, str]]:
    import tilelang
    from tilelang import tvm

    target = tvm.target.Target(dict(TARGET))
    with tvm.transform.PassContext(opt_level=3, config=program.pass_configs), target:
        artifact = tilelang.lower(prim_func, target=target)
    ((name, function),) = artifact.device_mod.functions.items()
    extents = {str(axis): str(extent) for axis, extent in function.attrs["thread_extent"].items()}
    return artifact.kernel_source, name.name_hint, extents


def lowering_key(program: Program) -> str:
    """Hash of all that the generated source depends on: the PrimFunc, how it is compiled, and TileLang's version.

    Building the PrimFunc takes a fraction of a second, generating its source many of them.
    """
    return _key(program, program.build())


def _key(program: Program, prim_func: Any) -> str:
    import tilelang

    text = repr((tilelang.__version__, sorted(program.pass_configs.items()), dict(TARGET), prim_func.script()))
    return hashlib.sha256(text.encode()).hexdigest()


def _read_cache(path: Path) -> tuple[str, str, dict[str, str]] | None:
    """What an earlier process kept; None if there is nothing or the file is damaged."""
    try:
        source, entry, extents = json.loads(path.read_text())
    except (OSError, TypeError, ValueError):
        return None
    whole = isinstance(source, str) and isinstance(entry, str) and isinstance(extents, dict)
    return (source, entry, extents) if whole else None


def _note(program: Program, source: str) -> str:
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    SOURCES[program.label] = sha256
    return sha256


@functools.cache
def executable(program: Program) -> Callable[..., None]:
    """The compiled function of `program`: compiled with nvcc, or loaded from TileLang's disk cache, once per process.

    It takes torch CUDA tensors and Python scalars in the order of the PrimFunc's parameters, checks shapes, dtypes and
    strides, and launches on torch's current stream of the tensors' device without synchronising.
    """
    import tilelang

    prim_func = program.build()
    kernel = tilelang.compile(
        prim_func,
        target=dict(TARGET),
        execution_backend="tvm_ffi",
        pass_configs=program.pass_configs,
    )
    _note(program, kernel.get_kernel_source())
    return kernel.adapter._get_executable()[str(prim_func.attrs["global_symbol"])]


def launch(program: Program, *args: Any) -> None:
    """Run `program` on CUDA tensors; on CPU tensors through `cpu_launcher`."""
    if cpu_launcher is not None:
        cpu_launcher(program, *args)
    else:
        executable(program)(*args)


@functools.cache
def capability(device: Any) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    import torch

    return torch.cuda.get_device_capability(device)
