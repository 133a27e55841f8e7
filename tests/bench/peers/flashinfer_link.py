"""Sets up the ahead-of-time build of FlashInfer's kernels, runs it, and links what it exported into one library."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zipfile
from pathlib import Path

from tests.bench.peers import pins, wheels
from tests.bench.peers.flashinfer_build import OBJECTS
from tests.bench.peers.flashinfer_runtime import INDEX, LIBRARY, SITE
from tests.bench.peers.pins import PEERS

DSL, TVM_FFI = "4.8.1", "0.1.15.post2"
#: what compiles; torch and numpy come from the environment that runs this
PACKAGES = (
    f"nvidia-cutlass-dsl=={DSL}",
    *(f"nvidia-cutlass-dsl-libs-{part}=={DSL}" for part in ("base", "core", "cu13")),
    f"apache-tvm-ffi=={TVM_FFI}",
    *("cuda-bindings==13.0.3", "cuda-pathfinder==1.9.1", "nvidia-cuda-runtime==13.0.96"),
)
#: what running needs nothing of, in tvm_ffi's wheel
SPARED = ("include/", "src/", "3rdparty/", "cython/", "share/")
STUB = Path(__file__).with_name("flashinfer_stub.c")


def build(options: argparse.Namespace) -> None:
    """Compile, link, and put library, index and tvm_ffi into .peers/flashinfer. Raises FetchError."""
    for tool in ("gcc", "g++"):
        if shutil.which(tool) is None:
            raise wheels.FetchError(f"{tool} is not on the PATH: install it, {wheels.AGAIN}.")
    peer = PEERS["flashinfer"]
    folder, base = peer.folder, pins.FOLDER / "build"
    # an object is known by its key, which does not say of which release it is
    work = base / f"{peer.version}-{DSL}"
    site = install(base / "site")
    wheels.say("flashinfer: compiling kernels that are not there yet, some 8 s each (about 90 by default)")
    shapes = ["--heads", *options.heads, "--requests", *options.requests, "--tokens", *options.tokens]
    wheels.run(
        [
            *(sys.executable, "-m", "tests.bench.peers.flashinfer_build", "--folder", str(work)),
            *map(str, shapes),
        ],
        "An out-of-memory kill or an interruption: run the same command again, what is compiled is kept.",
        PYTHONPATH=f"{site}:{site / 'nvidia_cutlass_dsl' / 'dsl_packages'}",
    )
    link(work, site, folder / LIBRARY)
    shutil.copyfile(work / INDEX, folder / INDEX)
    for python in options.python:
        add_tvm_ffi(wheels.download("apache-tvm-ffi", TVM_FFI, python), folder / SITE)
    if ".".join(map(str, sys.version_info[:2])) in options.python:
        check_import(folder / SITE)
    kernels = len(json.loads((folder / INDEX).read_text()))
    wheels.write_manifest("flashinfer", {**pins.manifest()["flashinfer"], "kernels": kernels, "python": options.python})
    wheels.say(f"flashinfer: {kernels} kernels in {(folder / LIBRARY).relative_to(pins.ROOT)}")


def install(site: Path) -> Path:
    """The compiler's packages in a folder of their own, once per list of packages."""
    stamp, recipe = site / "packages.txt", "\n".join(PACKAGES)
    if not stamp.exists() or stamp.read_text() != recipe:
        shutil.rmtree(site, ignore_errors=True)
        wheels.say("flashinfer: installing its compiler")
        wheels.pip("install", "--quiet", "--no-deps", "--no-compile", "--target", site, *PACKAGES)
        stamp.write_text(recipe)
    return site


def link(work: Path, site: Path, library: Path) -> None:
    """All exported objects in one library, with stand-ins for what CuTe DSL's own runtime would add."""
    symbols = json.loads((work / INDEX).read_text()).values()
    objects = [work / OBJECTS / f"{symbol}.o" for symbol in symbols]
    runtime = site / "nvidia_cutlass_dsl" / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    remedy = f"Remove .peers/build, {wheels.AGAIN}."
    wheels.run(["gcc", "-O2", "-fPIC", "-c", STUB, "-o", work / "stub.o"], remedy)
    command: list[str | Path] = ["g++", "-shared", "-s", "-o", library, *objects, work / "stub.o", runtime]
    command += ["-L", site / "tvm_ffi" / "lib", "-ltvm_ffi"]
    command += ["-L", site / "nvidia" / "cu13" / "lib", "-l:libcudart.so.13", "-ldl", "-lpthread"]
    wheels.run(command, remedy)


def add_tvm_ffi(wheel: Path, site: Path) -> None:
    """Wheels of several Python versions differ in one extension module, whose name says the version."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if not inner.startswith(SPARED):
                archive.extract(name, site)


def check_import(site: Path) -> None:
    """Raises FetchError if this interpreter cannot import tvm_ffi from there: better now than on a GPU."""
    code = "import pathlib, sys, tvm_ffi; assert pathlib.Path(sys.argv[1]) in pathlib.Path(tvm_ffi.__file__).parents"
    remedy = f"Something that it links with is not in {site}: take it out of SPARED, {wheels.AGAIN}."
    wheels.run([sys.executable, "-c", code, site], remedy, PYTHONPATH=str(site))
