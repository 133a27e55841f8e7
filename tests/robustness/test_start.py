"""What a new process pays before the first result: import, libraries of the wheel, the disk cache, compilation."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import libraries, runtime
from kernels.prepass.plan import plan
from probes import toolchain
from tests.gate_engine import Evidence

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("kernels.decode", "kernels.prepass", "kernels.replay", "kernels.verify")
FACTS = "H=1, HV=1, K=128, gate_dtype='bfloat16', bias_dtype='float32'"
PROGRAM = plan(H=1, HV=1, K=128, gate_dtype="bfloat16", bias_dtype="float32")

#: prints which compilers the process has loaded and how often it compiled
LOADS = f"""
import json, logging, sys
class Count(logging.Handler):
    def emit(self, record): messages.append(record.getMessage())
messages = []
logging.getLogger("hopper_gdn").addHandler(Count())
logging.getLogger("hopper_gdn").setLevel(logging.INFO)
from kernels import runtime
from kernels.prepass.plan import plan
function = runtime.executable(plan({FACTS}))
try:
    function(1)
except RuntimeError as error:
    refusal = str(error)
print(json.dumps([messages, refusal, "tilelang" in sys.modules, list(runtime.SOURCES.values())]))
"""


def start(script: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> list:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return list(json.loads(out.splitlines()[-1]))


@pytest.fixture(scope="module", autouse=True)
def nvcc() -> None:
    try:
        toolchain.tool("nvcc")
    except toolchain.ToolMissing as error:
        pytest.skip(f"{error}: not run here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the library of PROGRAM."""
    made = tmp_path_factory.mktemp("libraries")
    runtime.compile_into(PROGRAM, made)
    return made


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    for path in libraries.paths(folder, PROGRAM.label):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture
def carried(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the wheel carried it."""
    monkeypatch.setattr(libraries, "PREBUILT", copied)
    monkeypatch.setenv("HOPPER_GDN_CACHE", "")
    monkeypatch.delenv("HOPPER_GDN_PREBUILT", raising=False)
    return copied


@pytest.mark.criterion("8.30")
def test_import_touches_neither_tilelang_nor_a_device(evidence: Evidence) -> None:
    script = f"""
import json, os, sys
class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)
import torch
before, read = set(sys.modules), []
os.environ.__class__ = Watched
{chr(10).join(f"import {name}" for name in PUBLIC)}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = sorted(new & {{"tilelang", "tvm", "tvm_ffi", "triton"}})
print(json.dumps([foreign, torch.cuda.is_initialized(), [key for key in read if not key.startswith("PYTHON")]]))
"""
    compilers, initialised, variables = result(start(script))
    evidence.equal("compilers that import loads", compilers, [])
    evidence.equal("CUDA is initialised by import", initialised, False)
    evidence.equal("environment variables that import reads", variables, [])


@pytest.mark.criterion("8.31")
@pytest.mark.criterion("8.34")
def test_eight_processes_on_an_empty_cache_compile_once(tmp_path: Path, evidence: Evidence) -> None:
    cache = {"HOPPER_GDN_CACHE": str(tmp_path / "cache"), "TILELANG_CACHE_DIR": str(tmp_path / "tilelang")}
    found = [result(process) for process in [start(LOADS, **cache) for _ in range(8)]]
    evidence.equal("processes that compiled", [len(messages) for messages, *_ in found].count(1), 1)
    evidence.equal("processes that loaded a compiler", sum(loaded for _, _, loaded, _ in found), 1)
    for _, refusal, _, sources in found:
        assert "num_args" in refusal  # the checks of its own launch stub
        evidence.equal("source", sources, [runtime.lower(PROGRAM).sha256])
    again, _, loaded, _ = result(start(LOADS, **cache))
    evidence.equal("a later process compiles, loads a compiler", [again, loaded], [[], False])


@pytest.mark.criterion("8.31")
def test_a_library_of_the_wheel_comes_first(carried: Path, evidence: Evidence) -> None:
    function, library = libraries.load(PROGRAM.label) or (None, None)
    assert function is not None and library is not None
    with pytest.raises(RuntimeError, match="num_args"):
        function(1)
    evidence.equal("source", library.source, runtime.lower(PROGRAM).sha256)


@pytest.mark.criterion("8.32")
@pytest.mark.parametrize("fault", ("truncated", "other bytes", "no description", "torn description", "extra field"))
def test_a_damaged_library_is_not_used(fault: str, carried: Path, evidence: Evidence) -> None:
    path, sidecar = libraries.paths(carried, PROGRAM.label)
    content, described = path.read_bytes(), sidecar.read_text()
    if fault == "truncated":
        path.write_bytes(content[:-1])
    elif fault == "other bytes":
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif fault == "no description":
        sidecar.unlink()
    elif fault == "torn description":
        sidecar.write_text(described[: len(described) // 2])
    else:
        sidecar.write_text(json.dumps({**json.loads(described), "more": 1}))
    evidence.equal(fault, libraries.load(PROGRAM.label), None)


@pytest.mark.criterion("8.32")
@pytest.mark.parametrize("field", ("program", "inputs"))
def test_a_library_of_something_else_is_not_used(field: str, carried: Path, evidence: Evidence) -> None:
    _, sidecar = libraries.paths(carried, PROGRAM.label)
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), field: "another"}))
    evidence.equal(f"another {field}", libraries.load(PROGRAM.label), None)


@pytest.mark.criterion("8.32")
def test_a_changed_source_is_compiled_anew(folder: Path, tmp_path: Path, evidence: Evidence) -> None:
    """A copy of the package with one more comment in one program."""
    packages = tmp_path / "kernels"
    for path in (ROOT / "kernels").rglob("*.py"):
        copy = packages / path.relative_to(ROOT / "kernels")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    ask = "import json; from kernels import libraries; print(json.dumps([libraries.inputs_digest()]))"
    same: list[str] = []
    changed: list[str] = []
    for found, addition in ((same, ""), (changed, "# a comment\n")):
        with (packages / "prepass" / "program.py").open("a") as file:
            file.write(addition)
        done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        found += json.loads(done.stdout)
    evidence.equal("a copy has this digest", same, [libraries.inputs_digest()])
    evidence.equal("an edited copy has it", changed == same, False)


@pytest.mark.criterion("8.32")
def test_every_module_beside_the_packages_is_weighed() -> None:
    """Modules that generated sources do not depend on are named here; a new one must be put on one of the lists."""
    top = {path.stem for path in (ROOT / "kernels").glob("*.py")}
    assert top == {*libraries.MODULES, "checks", "libraries", "served"}
    packages = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    assert packages == set(libraries.PACKAGES)


@pytest.mark.criterion("8.32")
@pytest.mark.parametrize(("driver", "used"), (((12, 8), False), ((13, 0), True), (None, True)))
def test_a_driver_older_than_the_compiler(
    driver: tuple[int, int] | None, used: bool, carried: Path, evidence: Evidence, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    library = libraries.find(carried, PROGRAM.label)
    assert library is not None
    _, sidecar = libraries.paths(carried, PROGRAM.label)
    sidecar.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(library, cuda=(13, 0)))))
    monkeypatch.setattr(libraries, "_driver", lambda: driver)
    with caplog.at_level(logging.WARNING, "hopper_gdn"):
        evidence.equal(f"used with a driver of {driver}", libraries.load(PROGRAM.label) is not None, used)
    assert ("the driver is of CUDA 12.8" in caplog.text) == (not used)


@pytest.mark.criterion("8.32")
def test_switches(carried: Path, monkeypatch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    monkeypatch.setenv("HOPPER_GDN_PREBUILT", "0")
    evidence.equal("HOPPER_GDN_PREBUILT=0", libraries.load(PROGRAM.label), None)
    evidence.equal("HOPPER_GDN_CACHE=''", libraries.cache_folder(), None)
    monkeypatch.setenv("HOPPER_GDN_CACHE", str(carried))
    assert (chosen := libraries.cache_folder()) is not None
    assert chosen.parent == carried
    monkeypatch.delenv("HOPPER_GDN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert (chosen := libraries.cache_folder()) is not None
    assert chosen.parent == Path("/x/hopper-gdn")


@pytest.mark.criterion("8.35")
def test_without_a_cache_it_compiles_with_one_line(tmp_path: Path, evidence: Evidence) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    tilelang_cache = {"TILELANG_CACHE_DIR": str(tmp_path / "tilelang")}
    for name, cache, lines in (("off", "", 1), ("below a file", str(blocked), 2)):
        messages, refusal, _, _ = result(start(LOADS, HOPPER_GDN_CACHE=cache, **tilelang_cache))
        assert "num_args" in refusal
        evidence.equal(f"log lines, cache {name}", len(messages), lines)
        assert messages[-1] == f"compiling {PROGRAM.label} for this process"
