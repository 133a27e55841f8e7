"""Compile a translated kernel with g++, once per content: results lie under ``<repository>/.cache/emulator``."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.errors import EmulatorError
from tests.emulator.source import translate

CUDA = Path(__file__).parent / "cuda"
CACHE = Path(__file__).parents[2] / ".cache" / "emulator"

_COMMON = ("-std=c++20", "-march=x86-64-v3", "-fPIC", "-fvisibility=hidden")
_SEMANTICS = ("-fno-strict-aliasing", "-ffp-contract=off")
_RUNTIME = ("scheduler.cpp", "async.cpp", "tensor_core.cpp")


@dataclass(frozen=True)
class Flavour:
    """How a kernel is built: plain as a shared library, with a sanitizer as a program of its own."""

    name: str
    kernel_flags: tuple[str, ...]
    defines: tuple[str, ...] = ()

    @property
    def sanitized(self) -> bool:
        return self.name != "plain"


# -O1: -O2 runs a verify kernel in 15 instead of 20 ms, but compiles it in 0.5 instead of 0.35 s; the runtime with the
# tensor cores is always -O3
PLAIN = Flavour("plain", ("-O1", "-w"))
THREAD = Flavour("thread", ("-O1", "-g1", "-w", "-fsanitize=thread"), ("-DEMU_TSAN",))
ADDRESS = Flavour("address", ("-O1", "-g1", "-w", "-fsanitize=address", "-fsanitize-recover=address"), ("-DEMU_ASAN",))
UNDEFINED = Flavour(
    "undefined",
    ("-O1", "-g1", "-w", "-fsanitize=alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero"),
)


@functools.lru_cache(maxsize=1)
def compiler() -> tuple[str, str]:
    """Path and version of g++. Raises EmulatorError where the emulator cannot run."""
    path = shutil.which("g++")
    if path is None:
        raise EmulatorError("the emulator needs g++ on the PATH")
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise EmulatorError(f"the emulator runs on x86-64 Linux, not on {platform.machine()} {platform.system()}")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return path, version.splitlines()[0]


@functools.lru_cache(maxsize=1)
def _emulator_sources() -> bytes:
    return b"".join(p.name.encode() + p.read_bytes() for p in sorted(CUDA.iterdir()))


def _key(*parts: object) -> str:
    text = repr((compiler()[1], *parts)).encode()
    return hashlib.sha256(_emulator_sources() + text).hexdigest()[:32]


def _compile(arguments: list[str], directory: Path) -> None:
    path, _ = compiler()
    plain_text = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run([path, *arguments], cwd=directory, env=plain_text, capture_output=True, text=True)
    if result.returncode:
        missing = re.search(r"error: '(\w+)' (?:is not a member of 'tl'|was not declared)", result.stderr)
        if missing:
            raise EmulatorError(
                f"the generated source uses {missing[1]}, which is not emulated\n{result.stderr[:2000]}"
            )
        raise EmulatorError(f"g++ rejects the generated source\n{result.stderr[:3000]}")


def once(key: str, fill: Callable[[Path], None]) -> Path:
    """The directory `key` of the cache, made by `fill` if absent; processes may race, the first rename wins."""
    target = CACHE / key
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="building-", dir=CACHE))
    try:
        fill(scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def runtime(flavour: Flavour) -> Path:
    """Directory with the emulator's own objects and the precompiled `emu.h` for one flavour."""

    def fill(directory: Path) -> None:
        for name in (*_RUNTIME, *(["driver.cpp"] if flavour.sanitized else [])):
            flags = [*_COMMON, *_SEMANTICS, *flavour.defines, "-O3"]
            _compile([*flags, "-c", str(CUDA / name), "-o", name.replace(".cpp", ".o")], directory)
        header = [*_COMMON, *_SEMANTICS, *flavour.defines, *flavour.kernel_flags, "-x", "c++-header"]
        _compile([*header, str(CUDA / "emu.h"), "-o", "emu.h.gch"], directory)

    return once(f"runtime-{flavour.name}-{_key(_COMMON, _SEMANTICS, flavour)}", fill)


def compile_kernel(source: str, entry: str, flavour: Flavour = PLAIN) -> Path:
    """Compile generated CUDA; returns the shared library (plain) or the program (sanitized)."""
    product = "program" if flavour.sanitized else "kernel.so"
    translated = translate(source, entry)

    def fill(directory: Path) -> None:
        (directory / "kernel.cpp").write_text(translated)
        (directory / "kernel.cu").write_text(source)
        objects = runtime(flavour)
        flags = [*_COMMON, *_SEMANTICS, *flavour.defines, *flavour.kernel_flags]
        _compile([*flags, f"-I{objects}", f"-I{CUDA}", "-c", "kernel.cpp", "-o", "kernel.o"], directory)
        link = [] if flavour.sanitized else ["-shared"]
        parts = sorted(str(p) for p in objects.glob("*.o"))
        _compile([*flags, *link, "kernel.o", *parts, "-o", product], directory)
        (directory / "kernel.o").unlink()

    return once(f"{flavour.name}-{_key(_COMMON, _SEMANTICS, flavour, translated)}", fill) / product
