"""Compiled programs as shared libraries: those that the wheel carries, and a disk cache of what was compiled here.

A library is loaded with tvm_ffi and TVM's runtime alone, in milliseconds: neither TileLang nor nvcc is needed. Beside
each one lies what it was made from. It is used only if that is what the installed sources would be compiled from, so an
edited program is compiled anew. `python -m tests.precompile` fills both places without a GPU.

Cache: $HOPPER_GDN_CACHE, else $XDG_CACHE_HOME/hopper-gdn, else ~/.cache/hopper-gdn; HOPPER_GDN_CACHE="" keeps none.
HOPPER_GDN_PREBUILT=0 leaves the wheel's libraries alone. Both are read whenever a program is needed for the first time.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("hopper_gdn")

HERE = Path(__file__).parent
PREBUILT = HERE / "prebuilt"

#: what a generated source depends on: packages and modules beside this one, which may share the folder with others
PACKAGES = ("decode", "prepass", "replay", "verify")
MODULES = ("lone_warps", "recurrent_steps", "runtime", "steps", "tile", "warp")


@dataclasses.dataclass(frozen=True)
class Library:
    """What is written beside a shared library, as JSON."""

    program: str  # label
    function: str  # its name in the library
    inputs: str  # `inputs_digest` of the sources it was made from
    tilelang: str  # version that generated it
    cuda: tuple[int, int]  # toolkit that compiled it; an older driver may not know its format
    source: str  # sha256 of the generated CUDA
    content: str  # sha256 of the shared library


@functools.cache
def inputs_digest() -> str:
    """Hash of the Python sources that the programs are built from: 1 ms."""
    digest = hashlib.sha256()
    files = [path for package in PACKAGES for path in (HERE / package).rglob("*.py")]
    for path in sorted([*files, *(HERE / f"{name}.py" for name in MODULES)]):
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_folder() -> Path | None:
    """Where libraries that were compiled here are kept: a folder for each state of the sources and each TileLang."""
    chosen = os.environ.get("HOPPER_GDN_CACHE")
    if chosen == "":
        return None
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hopper-gdn"
    return base / f"{inputs_digest()[:16]}-tilelang-{importlib.metadata.version('tilelang')}"


def load(label: str) -> tuple[Callable[..., None], Library] | None:
    """The compiled function of a program from the wheel or the cache; None where there is none that fits."""
    folders = [PREBUILT] if os.environ.get("HOPPER_GDN_PREBUILT") != "0" else []
    for folder in filter(None, [*folders, cache_folder()]):
        library = find(folder, label)
        if library is None:
            continue
        if (driver := _driver()) and driver < library.cuda:
            log.warning("%s was compiled with CUDA %s, the driver is of CUDA %s: compiling it here", label, *(
                ".".join(map(str, version)) for version in (library.cuda, driver)
            ))  # fmt: skip
            continue
        try:
            return _function(paths(folder, label)[0], library.function), library
        except (OSError, RuntimeError, AttributeError, ImportError) as error:
            log.warning("%s does not load, compiling it here: %s", paths(folder, label)[0], error)
    return None


def find(folder: Path, label: str) -> Library | None:
    """The library of a program in `folder`, if it is whole and made from the installed sources."""
    path, sidecar = paths(folder, label)
    try:
        fields = json.loads(sidecar.read_text())
        library = Library(**{**fields, "cuda": tuple(fields["cuda"])})
        content = path.read_bytes()
    except (OSError, TypeError, ValueError, KeyError):
        return None
    fits = library.program == label and library.inputs == inputs_digest()
    return library if fits and library.content == hashlib.sha256(content).hexdigest() else None


def keep(folder: Path, label: str, kernel: Any, function: str, source: str) -> Library:
    """Write the library of a compiled TileLang kernel into `folder`; readers see all of it or nothing.

    Raises OSError where the folder cannot be written.
    """
    import tilelang

    folder.mkdir(parents=True, exist_ok=True)
    path, sidecar = paths(folder, label)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
        made = Path(scratch, path.name)
        kernel.export_library(str(made))
        content = hashlib.sha256(made.read_bytes()).hexdigest()
        library = Library(label, function, inputs_digest(), tilelang.__version__, _toolkit(), source, content)
        described = made.with_suffix(".json")
        described.write_text(json.dumps(dataclasses.asdict(library), indent=1) + "\n")
        # A crash between the two leaves a pair that does not fit, which `find` does not accept.
        made.replace(path)
        described.replace(sidecar)
    return library


@contextlib.contextmanager
def building(folder: Path, label: str) -> Iterator[None]:
    """One process at a time compiles a program: the others wait, and then find it. Raises OSError as `keep` does."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with paths(folder, label)[0].with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a crash
        yield


def paths(folder: Path, label: str) -> tuple[Path, Path]:
    """Where the library of a program lies in `folder`, and what it was made from."""
    module = label.partition("(")[0].removeprefix("kernels.")
    stem = folder / f"{module}-{hashlib.sha256(label.encode()).hexdigest()[:16]}"
    return stem.with_name(f"{stem.name}.so"), stem.with_name(f"{stem.name}.json")


def _function(path: Path, name: str) -> Callable[..., None]:
    _load_tvm_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[name]


@functools.cache
def _load_tvm_runtime() -> None:
    """Load TVM's runtime from TileLang's folder, without importing TileLang (seconds). Raises OSError."""
    import tvm_ffi  # noqa: F401, the runtime registers its functions with it

    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise OSError("tilelang is not installed")
    ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", "libtvm_runtime.so")), ctypes.RTLD_GLOBAL)


@functools.cache
def _driver() -> tuple[int, int] | None:
    """The CUDA version that the driver is of; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _toolkit() -> tuple[int, int]:
    """Version of the nvcc that TileLang compiles with."""
    from tilelang.contrib import nvcc

    major, minor = nvcc.get_cuda_version()[:2]
    return int(major), int(minor)
