"""From generated CUDA to facts about the machine code: a cubin, its resources, its instructions.

`cubin` compiles the way TileLang's own CUDA back end does (same nvcc, same include directories, same flags), so
what is counted here is what TileLang loads on a GPU. Nothing here needs a device. Results are kept in
``.cache/cubin``, keyed by the source, the flags and the compiler's version, so that each program meets nvcc once.

Tools are looked for on the PATH, then in the ``nvidia`` wheels of the Python environment (``nvidia/cu13/bin``),
and the two disassemblers also in an installed Triton. A missing tool raises `ToolMissing`, which names the remedy.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ARCH = "sm_90a"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "cubin"

#: Wheels that provide each tool. The five behind nvcc must share one minor version: left alone, nvidia-cuda-nvcc
#: pulls the newest nvidia-nvvm, whose PTX its ptxas refuses.
REMEDY = {
    "nvcc": (
        "nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 "
        "nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96"
    ),
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}


class ToolMissing(RuntimeError):
    """A CUDA tool is not installed."""


class CompileError(RuntimeError):
    """nvcc refused a source; the message is its output."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says about the one kernel of a cubin. Bytes, except for `registers` (per thread) and `barriers`."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int  # dynamic shared memory, where TileLang puts tiles, is set at launch and not counted
    barriers: int

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


class Instructions(collections.Counter[str]):
    """How often each SASS instruction, with its modifiers, stands in a kernel: ``{"LDG.E.128.CONSTANT": 4}``."""

    def of(self, name: str, *modifiers: str) -> int:
        """Static count of `name` instructions that carry every one of `modifiers`."""
        wanted = set(modifiers)
        return sum(n for op, n in self.items() if op.split(".")[0] == name and wanted <= set(op.split(".")[1:]))


def _package_directories(package: str, *inside: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root).joinpath(*inside)


def _candidates(name: str) -> Iterator[Path]:
    if on_path := shutil.which(name):
        yield Path(on_path)
    for folder in _package_directories("nvidia", "cu13", "bin"):
        yield folder / name
    for folder in _package_directories("triton", "backends", "nvidia", "bin"):
        yield folder / name


@functools.cache
def tool(name: str) -> Path:
    """Path of ``nvcc``, ``nvdisasm`` or ``cuobjdump``. Raises ToolMissing."""
    for path in _candidates(name):
        if os.access(path, os.X_OK):
            return path
    raise ToolMissing(
        f"{name} is neither on the PATH nor in the nvidia wheels of this environment; "
        f"install a CUDA 13 toolkit, or: python -m pip install {REMEDY[name]}"
    )


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)


@functools.cache
def nvcc_version() -> str:
    """For example ``13.0.88``. Raises ToolMissing, or CompileError if nvcc does not start."""
    out = _run([tool("nvcc"), "--version"])
    match = re.search(r"\bV(\d+\.\d+\.\d+)", out.stdout)
    if match is None:
        raise CompileError(f"{tool('nvcc')} --version: {out.stdout}{out.stderr}")
    return match[1]


@functools.cache
def _tilelang() -> tuple[str, tuple[str, ...]]:
    """TileLang's version and the include flags of its templates and of CUTLASS."""
    import tilelang
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    return tilelang.__version__, (f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}")


def cubin(source: str, *, flags: Sequence[str] = ()) -> Path:
    """Compile the CUDA `source` of one kernel for sm_90a (seconds; cached on disk) and return the cubin's path.

    `flags` are further nvcc options, such as ``--use_fast_math`` for a program with TL_ENABLE_FAST_MATH.
    Raises ToolMissing without nvcc and CompileError with nvcc's text.
    """
    version, includes = _tilelang()
    options = ["-cubin", "-O3", "-lineinfo", "-std=c++20", f"-arch={ARCH}", "-w", "-Xptxas=-v", *flags]
    key = "\n".join([nvcc_version(), version, *options, source])
    path = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            text, binary = Path(scratch, "kernel.cu"), Path(scratch, "kernel.cubin")
            text.write_text(source)
            out = _run([tool("nvcc"), *options, *includes, "-o", binary, text])
            if out.returncode:
                raise CompileError(f"{tool('nvcc')}: {out.stdout}{out.stderr}")
            log = Path(scratch, "ptxas")
            log.write_text(out.stdout + out.stderr)
            os.replace(log, path.with_suffix(".ptxas"))
            os.replace(binary, path)  # last, and atomic: a cubin in the cache is complete, whoever wrote it
    return path


def resources(path: Path) -> Resources:
    """Resources of the kernel in a cubin that `cubin` returned."""
    return parse_ptxas(path.with_suffix(".ptxas").read_text())


def parse_ptxas(log: str) -> Resources:
    """Read the output of ``ptxas -v`` for one kernel. Raises ValueError if it holds none, or several."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.findall(r"Used (\d+) registers(.*)", log)
    if len(frames) != 1 or len(used) != 1:
        raise ValueError(f"expected the ptxas report of one kernel, got:\n{log}")
    (stack, stores, loads), (registers, rest) = frames[0], used[0]
    barriers = re.search(r"used (\d+) barriers", rest)
    shared = re.search(r"(\d+) bytes smem", rest)
    return Resources(
        registers=int(registers),
        spill_stores=int(stores),
        spill_loads=int(loads),
        stack=int(stack),
        static_shared=int(shared[1]) if shared else 0,
        barriers=int(barriers[1]) if barriers else 0,
    )


def sass(path: Path) -> Instructions:
    """Instruction counts of a cubin; its listing is kept beside it. Raises ToolMissing without a disassembler."""
    listing = path.with_suffix(".sass")
    if not listing.exists():
        try:
            command: list[str | Path] = [tool("nvdisasm"), "-c", path]
        except ToolMissing:
            command = [tool("cuobjdump"), "-sass", path]
        out = _run(command)
        if out.returncode:
            raise CompileError(f"{command[0]}: {out.stdout}{out.stderr}")
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            scratch.write(out.stdout)
        os.replace(scratch.name, listing)
    return parse_sass(listing.read_text())


def parse_sass(listing: str) -> Instructions:
    """Count the instructions of an nvdisasm or cuobjdump listing, with their modifiers, without their predicates.

    Raises ValueError if there are none.
    """
    return Instructions(_instructions(listing))


def _instructions(listing: str) -> list[str]:
    found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.M)
    if not found:
        raise ValueError(f"no instruction in the listing: {listing[:200]!r}")
    return found


#: of global memory, and those after which "before" no longer means "earlier in the listing"
NOT_BEFORE_THE_WAIT = frozenset(("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "UBLKCP", "BRA", "CALL"))


def before_the_wait(path: Path) -> list[str]:
    """What a cubin's kernel does too early: accesses to global memory, and branches, ahead of its wait for the launch
    before it (programmatic dependent launch). All of them if it never waits."""
    sass(path)
    found = [name.split(".")[0] for name in _instructions(path.with_suffix(".sass").read_text())]
    wait = found.index("ACQBULK") if "ACQBULK" in found else len(found)
    return [name for name in found[:wait] if name in NOT_BEFORE_THE_WAIT]
