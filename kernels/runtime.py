"""Compile or load a TileLang program once, then launch it with no work left per call.

A *program* is a module that offers `build(config) -> PrimFunc`, a frozen dataclass `Config` with the static
configuration, and `PASS_CONFIGS`. Its label, for example ``probes.outer_product(BV=64, K=128)``, is the key
under which the sha256 of its generated CUDA appears in every recorded result, and is enough to build it again.

Nothing here touches a device, the environment or TileLang at import time.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import libraries

if TYPE_CHECKING:
    import torch

log = logging.getLogger("hopper_gdn")

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
        module = importlib.import_module(self.module)
        _allow_python_loops()
        return module.build(self.config)

    @property
    def pass_configs(self) -> dict[str, Any]:
        return dict(importlib.import_module(self.module).PASS_CONFIGS)


@functools.cache
def _allow_python_loops() -> None:
    """Teach a TileLang before 0.1.15 the loops over tuples that unroll while a program is built; there an error."""
    from tilelang.language.eager import builder

    if hasattr(builder, "PythonLoopFrame"):
        return
    loop = builder.Builder.ctx_for

    def ctx_for(self: Any, iterable: Any) -> Iterator[Any]:
        yield from iterable if isinstance(iterable, tuple) else loop(self, iterable)

    builder.Builder.ctx_for = ctx_for


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
    """The compiled function of `program`: from the wheel, from the disk cache (libraries.py) or compiled with nvcc now.

    It takes torch CUDA tensors and Python scalars in the order of the PrimFunc's parameters, checks shapes, dtypes and
    strides, and launches on torch's current stream of the tensors' device without synchronising.
    """
    if not program.module.startswith("kernels."):
        return compile_into(program, None)  # the digest of the libraries does not cover its source
    if found := _from_library(program):
        return found
    folder = libraries.cache_folder()
    try:
        with contextlib.ExitStack() as waiting:
            if folder is not None:
                waiting.enter_context(libraries.building(folder, program.label))
            return _from_library(program) or compile_into(program, folder)
    except OSError as error:
        log.info("no disk cache: %s", error)
        return compile_into(program, None)


def warmup(
    H: int,
    HV: int,
    *,
    K: int = 128,
    V: int = 128,
    pool: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    operations: Sequence[str] | None = None,
) -> int:
    """Load or compile what serving a model launches, so that no later call waits for a compiler; how many programs.

    Args:
        H, HV: key and value heads of one rank. K, V: state dims of a head.
        pool: dtype of the states. gate_dtype: of a and b. bias_dtype: of dt_bias. Default: torch.bfloat16 for each.
        operations: which of kernels.served.OPERATIONS; all if left out.
    Raises:
        ValueError: an unknown operation, or a shape or dtype that no program is built for.
    A program that is neither in the wheel nor in the disk cache takes some 5 s of one core. No GPU is needed. Variants
    beside these (a commit inside verify, prepass, lossless, dense states) are compiled by the first call of each.
    """
    from kernels import checks, served

    checks.supported(K, V)
    if H <= 0 or HV % H:
        raise ValueError(f"H is {H} and HV is {HV}, HV must be a multiple of H, which is positive")
    dtypes = {"pool": pool, "gate_dtype": gate_dtype, "bias_dtype": bias_dtype}
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in checks.FLOATS:
            raise ValueError(f"{name} is {dtype}, must be one of {checks.FLOATS}")
    names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items() if dtype is not None}
    programs = served.programs(H, HV, K=K, V=V, **names, operations=operations or served.OPERATIONS)
    for program in programs:
        executable(program)
    return len(programs)


def _from_library(program: Program) -> Callable[..., None] | None:
    found = libraries.load(program.label)
    if found is None:
        return None
    function, library = found
    SOURCES[program.label] = library.source
    return function


def compile_into(program: Program, folder: Path | None) -> Callable[..., None]:
    """Compile `program` with nvcc now, and keep its library in `folder`. Raises OSError if that cannot be written."""
    log.info("compiling %s for %s", program.label, folder or "this process")
    import tilelang

    prim_func = program.build()
    kernel = tilelang.compile(
        prim_func,
        target=dict(TARGET),
        execution_backend="tvm_ffi",
        pass_configs=program.pass_configs,
    )
    source, function = kernel.get_kernel_source(), str(prim_func.attrs["global_symbol"])
    _note(program, source)
    if folder is not None:
        libraries.keep(folder, program.label, kernel, function, SOURCES[program.label])
    return kernel.adapter.get_exportable_executable()[function]


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
