"""Compiles FlashInfer's bf16-state kernels ahead of time for SM90, on a machine without a GPU.

    python -m tests.bench.peers.flashinfer_build --folder F --heads 16/32 --requests 1 8 --tokens 1 4

Runs the adapters' own calls through the unmodified wrappers, on tensors that pretend to be on a GPU, and exports what
each call would compile: F/objects/<symbol>.o, and F/index.json (key -> symbol). What is already there is kept, so an
interrupted build goes on where it was. Needs nvidia-cutlass-dsl and the wrappers; fetch.py sets that up.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.bench.implementation import Unsupported
from tests.bench.peers import found
from tests.bench.peers.flashinfer_entries import ENTRIES
from tests.bench.peers.flashinfer_runtime import INDEX, Kernel, kernel_key
from tests.bench.problem import RING, K, Problem, Shape, V

OBJECTS = "objects"
#: of an H100 or H200 SXM: their number decides some tiles and launch bounds
MULTIPROCESSORS, SHARED_MEMORY = 132, 233472
ARCHITECTURE = "sm_90a"


class Hollow(Problem):
    """A problem whose tensors have shapes and no values: memory that nobody touches is never there."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.device, self.ways = shape, torch.device("cpu"), 1
        N, H, HV = shape.N, shape.H, shape.HV
        rows, numbers = 2 * H * K + HV * V, torch.ones(N, dtype=torch.int32)
        self.mixed = torch.empty(N * shape.T, rows, dtype=torch.bfloat16)
        self.q, self.k, self.v = self.split(self.mixed)
        self.a, self.b = (torch.empty(N * shape.T, HV, dtype=torch.bfloat16) for _ in "ab")
        self.A_log, self.dt_bias = torch.empty(HV), torch.empty(HV)
        self.pool = torch.empty(1 + N, HV, V, K, dtype=torch.bfloat16)
        self.indices, self.rows, self.lengths, self.history = [numbers], numbers, numbers, numbers
        self.past_mixed = torch.empty(N * RING, rows, dtype=torch.bfloat16)
        self.past_a, self.past_b = (torch.empty(N * RING, HV, dtype=torch.bfloat16) for _ in "ab")


def shapes(heads: list[str], requests: list[int], tokens: list[int]) -> Iterator[Shape]:
    """Every op of every shape; which entries take it they say themselves. `heads` as "H/HV"."""
    ops = sorted(frozenset[str]().union(*(entry.ops for entry in ENTRIES)))
    for pair in heads:
        H, HV = map(int, pair.split("/"))
        for N in requests:
            for T in tokens:
                for op in ops:
                    yield Shape(op, N, T, H, HV, cold=False)


def pretend_sm90() -> None:
    """Torch answers as if an SM90 device were there, and is capturing a graph: the wrappers then read no values."""
    device = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, major=9, minor=0)
    answers: dict[str, Any] = {
        "get_device_properties": device,
        "get_device_capability": (9, 0),
        "current_stream": SimpleNamespace(cuda_stream=0),
        "current_device": 0,
        "is_current_stream_capturing": True,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def pretend_target(modules: tuple[ModuleType, ...]) -> None:
    """The wrappers take CPU tensors for tensors of that device."""
    target = vars(modules[0])["gdn_device_target"].__globals__["GdnDeviceTarget"](
        0, ARCHITECTURE, 9, 0, MULTIPROCESSORS, False
    )
    answer = lambda device: target  # noqa: E731
    for names in (*map(vars, modules), vars(modules[0])["gdn_compile_options"].__globals__):
        names["gdn_device_target"] = answer


class OnGpu:
    """A CPU tensor whose DLPack capsule says that it is on a CUDA device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object:
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer_of(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value = 2
        return capsule


class Exporter:
    """Exports each kernel once, by key, and hands back a kernel that does nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / INDEX
        (folder / OBJECTS).mkdir(parents=True, exist_ok=True)
        known: dict[str, str] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.index = {key: symbol for key, symbol in known.items() if self.object_of(symbol).exists()}
        self.built = 0

    def object_of(self, symbol: str) -> Path:
        return self.folder / OBJECTS / f"{symbol}.o"

    def export(self, key: str, compile_it: Kernel) -> Kernel:
        if key not in self.index:
            start, symbol = time.monotonic(), "fi_" + hashlib.sha256(key.encode()).hexdigest()[:16]
            unfinished = self.folder / OBJECTS / "unfinished.o"
            compile_it().export_to_c(str(unfinished), function_name=symbol)
            os.replace(unfinished, self.object_of(symbol))
            self.index[key] = symbol
            written = self.path.with_suffix(".new")
            written.write_text(json.dumps(self.index, indent=0))
            os.replace(written, self.path)
            self.built += 1
            print(f"  {time.monotonic() - start:5.1f} s  {key[:110]}", flush=True)
        return lambda *arguments: None


class Compile:
    """cute.compile, whose WY kernels are exported; all others are compiled as asked, for build_and_load."""

    def __init__(self, real: Any, exporter: Exporter) -> None:
        self.real, self.exporter = real, exporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __getitem__(self, options: tuple[Any, ...]) -> Kernel:
        def compile_it(kernel: Any, *arguments: Any) -> Any:
            if not type(kernel).__name__.startswith("GdnDecode"):
                return self.real[options](kernel, *arguments)
            cute = importlib.import_module("cutlass.cute")
            exportable = (*options, cute.EnableTVMFFI(True), cute.GenerateLineInfo(True), cute.OptLevel(3))
            key = kernel_key(kernel, arguments)
            return self.exporter.export(key, lambda: self.real[exportable](kernel, *arguments))

        return compile_it

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.real(*arguments, **options)


def load_wrappers(exporter: Exporter) -> tuple[ModuleType, ...]:
    """FlashInfer's modules on the real CuTe DSL, exporting."""
    cute = importlib.import_module("cutlass.cute")
    runtime = importlib.import_module("cutlass.cute.runtime")
    dsl_cuda = importlib.import_module("cutlass.base_dsl.runtime.cuda")
    vars(dsl_cuda)["get_device_attribute"] = lambda attribute, device_id=0: SHARED_MEMORY
    from_dlpack = runtime.from_dlpack
    vars(runtime)["from_dlpack"] = lambda tensor, *args, **options: from_dlpack(
        OnGpu(tensor), *args, **{**options, "enable_tvm_ffi": False}
    )
    vars(cute)["compile"] = Compile(cute.compile, exporter)

    def build_and_load(module: str, name: str, compile_it: Kernel, files: object = (), **options: Any) -> Kernel:
        return exporter.export(f"{module}/{name}", compile_it)

    names = {"build_and_load_cute_dsl_kernel": build_and_load}
    modules = found.load_unpacked("flashinfer", {"flashinfer.jit": {}, "flashinfer.jit.cute_dsl_core": names})
    pretend_target(modules)
    return modules


def call_all(modules: tuple[ModuleType, ...], wanted: Iterator[Shape]) -> list[str]:
    """Every entry on every shape that it takes, once. Returns what failed."""
    failed = []
    for shape in wanted:
        for entry_type in ENTRIES:
            entry = entry_type(lambda: modules)
            if shape.op not in entry.ops:
                continue
            try:
                entry.bind(Hollow(shape)).launch(0)
            except Unsupported:
                continue
            except Exception as error:
                failed.append(f"{entry.name} on {shape}: {type(error).__name__}: {str(error)[:300]}")
    return failed


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """The options that choose shapes. The default N differ in their kernels only in four groups."""
    parser.add_argument("--heads", nargs="+", default=["16/32"], metavar="H/HV")
    parser.add_argument("--requests", nargs="+", type=int, default=[2**i for i in range(9)], metavar="N")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 12, 16], metavar="T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    add_shapes(parser)
    options = parser.parse_args()
    os.environ["CUTE_DSL_ARCH"] = ARCHITECTURE
    start, exporter = time.monotonic(), Exporter(options.folder)
    pretend_sm90()
    failed = call_all(load_wrappers(exporter), shapes(options.heads, options.requests, options.tokens))
    print(
        f"{exporter.built} kernels built in {time.monotonic() - start:.0f} s, {len(exporter.index)} in all", flush=True
    )
    if failed:
        sys.exit("FlashInfer's kernels were not all built:\n  " + "\n  ".join(failed))


if __name__ == "__main__":
    main()
