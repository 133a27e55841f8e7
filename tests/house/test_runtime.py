"""Labels, generated sources and their cache; and that nothing needs TileLang before a program is built."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kernels import runtime
from kernels.runtime import Program
from probes import grid_limit, toolchain
from tests.house import CPU_CALL

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    """As a program module has one; this module is the program."""

    n: int
    x: float = 0.5
    text: str = ""
    flag: bool = False
    nested: Any = None


def mine(**fields: Any) -> Program:
    return Program(__name__, Config(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": -3, "x": -1.5e-30},
        {"n": 2**70, "flag": True},
        {"n": 1, "text": "a, b=(1)'\"\\ \n ) # ü"},
        {"n": 1, "nested": (1, ("a", -2.0), {"k": [True, None]}, {3})},
    ],
)
def test_labels_round_trip(fields: dict[str, Any]) -> None:
    program = mine(**fields)
    again = Program.from_label(program.label)
    assert again == program
    assert again.label == program.label
    values = [getattr(again.config, field.name) for field in dataclasses.fields(Config)]
    assert [type(value) for value in values] == [
        type(getattr(program.config, field.name)) for field in dataclasses.fields(Config)
    ]


def test_a_label_is_readable() -> None:
    assert Program("probes.grid_limit", grid_limit.Config("y")).label == "probes.grid_limit(axis='y')"
    assert Program.from_label("probes.grid_limit(axis='y')") == Program("probes.grid_limit", grid_limit.Config("y"))


@pytest.mark.parametrize(
    "label",
    [
        "",
        "probes.grid_limit",
        "probes.grid_limit(",
        "probes.grid_limit(axis='x'",
        "probes.grid_limit(axis=)",
        "probes.grid_limit('x')",
        "probes.grid_limit(**{'axis': 'x'})",
        "probes.grid_limit(*['x'])",
        "probes.grid_limit(axis=print('evaluated'))",
        "probes.grid_limit(axis=x)",
        "probes.grid_limit(axis='x')(axis='y')",
        "probes.grid_limit(axis='x') + f(axis='y')",
        "probes.grid_limit(axis='x', axis='y')",
        "probes.grid_limit(axis={[]: 1})",
        ".probes(axis='x')",
        "probes..grid_limit(axis='x')",
        "probes.grid_limit(axis='\0')",
    ],
)
def test_what_is_no_label(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"not a program label: .*expected 'module\(field=literal"):
        Program.from_label(label)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("probes.grid_limit(axis='x', depth=2)", r"does not fit probes.grid_limit.Config: .*'depth'"),
        ("probes.grid_limit()", r"does not fit probes.grid_limit.Config: .*'axis'"),
        ("probes.no_such_probe(axis='x')", r"there is no module probes.no_such_probe"),
        ("no_such_room.grid_limit(axis='x')", r"there is no module no_such_room.grid_limit"),
        ("probes.grid_limit.deeper(axis='x')", r"there is no module probes.grid_limit.deeper"),
        ("probes.toolchain(axis='x')", r"probes.toolchain is not a program, it has no Config"),
    ],
)
def test_a_label_of_nothing(label: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Program.from_label(label)


def test_a_missing_dependency_is_not_a_wrong_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_program.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        Program.from_label("half_a_program()")


# Generated sources

PROBE = Program("probes.grid_limit", grid_limit.Config("x"))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    noted: dict[str, str] = {}
    monkeypatch.setattr(runtime, "SOURCES", noted)
    return noted


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime, "lowered_cache", tmp_path / "lowered")
    return tmp_path / "lowered"


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the programs that TileLang was asked for."""
    asked: list[str] = []
    generate = runtime._generate

    def count(program: Program, prim_func: Any) -> Any:
        asked.append(program.label)
        return generate(program, prim_func)

    monkeypatch.setattr(runtime, "_generate", count)
    return asked


def lower(program: Program = PROBE) -> runtime.Lowered:
    """Without the memory of this process."""
    return runtime.lower.__wrapped__(program)


def same(a: runtime.Lowered, b: runtime.Lowered) -> bool:
    return (a.source, a.sha256, a.entry, a.extents) == (b.source, b.sha256, b.entry, b.extents)


def test_a_pickled_program_does_not_carry_its_hash() -> None:
    """Hashes of text differ between processes."""
    hash(PROBE)
    again = pickle.loads(pickle.dumps(PROBE))
    assert "_hash" in vars(PROBE) and "_hash" not in vars(again)
    assert again == PROBE and hash(again) == hash(PROBE)


def test_lower_is_deterministic(sources: dict[str, str], generated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "lowered_cache", None)
    first, second = lower(), lower()
    assert generated == [PROBE.label] * 2
    assert same(first, second)
    assert first.entry in first.source
    assert first.extents["threadIdx.x"] == "32" and "N" in first.extents["blockIdx.x"]
    assert sources == {PROBE.label: first.sha256}


def test_the_cache_gives_the_same_source(cache: Path, sources: dict[str, str], generated: list[str]) -> None:
    first, second = lower(), lower()
    assert generated == [PROBE.label]
    assert same(first, second)
    assert sources == {PROBE.label: first.sha256}
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_the_cache_tells_programs_apart(
    cache: Path, sources: dict[str, str], generated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Program("probes.grid_limit", grid_limit.Config("y"))
    assert lower().source != lower(other).source
    monkeypatch.setattr(
        grid_limit, "PASS_CONFIGS", {**grid_limit.PASS_CONFIGS, "tl.disable_safe_memory_legalize": True}
    )
    lower()
    assert generated == [PROBE.label, other.label, PROBE.label]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: b"\xff\xfe" + data,
        lambda data: b"[]",
        lambda data: b"null",
        lambda data: b'"abc"',
        lambda data: json.dumps([None, *json.loads(data)[1:]]).encode(),
    ],
    ids=["empty", "half", "zeros", "binary", "list", "null", "text", "no source"],
)
def test_a_damaged_cache_file_is_generated_again(
    damage: Any, cache: Path, sources: dict[str, str], generated: list[str]
) -> None:
    first = lower()
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert same(lower(), first)
    assert same(lower(), first)
    assert generated == [PROBE.label] * 2  # and kept again


def test_what_is_compiled_is_what_was_lowered(sources: dict[str, str]) -> None:
    """The sha256 in a record names the text that nvcc compiles; nvcc is needed, a GPU is not."""
    try:
        toolchain.tool("nvcc")
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))
    runtime.executable.__wrapped__(PROBE)
    compiled = sources.pop(PROBE.label)
    assert compiled == lower().sha256


# What an import needs

NO_TILELANG = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def python(*scripts: str) -> str:
    """stdout of a fresh interpreter that sees this checkout and this environment."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(textwrap.dedent(script) for script in scripts)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_import_touches_nothing() -> None:
    """Neither TileLang nor a device nor the environment."""
    report = """
    import os, sys
    import torch

    def refuse(*args):
        raise AssertionError("the import asked for a device")

    torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
    before = dict(os.environ)
    import kernels.runtime, reference.pool, kernels.verify, kernels.verify.plan
    heavy = {"tilelang", "tvm", "tvm_ffi", "triton"}
    print(sorted(heavy & {name.split(".")[0] for name in sys.modules}), before == dict(os.environ))
    """
    assert python(report) == "[] True"


def test_cpu_tensors_need_no_tilelang() -> None:
    plan = """
    program = verify.api.plan(
        H=1, HV=2, K=128, V=128, pool="bfloat16", raw_gates=True, gate_dtype="bfloat16", bias_dtype="float32",
        l2norm=True, commit=False, max_tokens=12,
    )
    try:
        program.build()
    except ModuleNotFoundError as error:
        print(error.name, program.label)
    """
    absent, _, label = python(NO_TILELANG, CPU_CALL, plan).partition(" ")
    assert absent.startswith("tilelang")  # only building the program needs it
    assert Program.from_label(label).label == label


def test_recorded_labels_of_verify_keep_their_meaning() -> None:
    from kernels.verify import chunk

    label = (
        "kernels.verify.chunk(H=2, HV=4, pool='float32', raw_gates=False, gate_dtype='float32', bias_dtype='float32', "
        "l2norm=True, commit=True, blocks=True, norms_given=False, K=128, V=256, BV=32, threads=128, head_batch=1, "
        "direct_up_to=2048, blocks_per_sm=3)"
    )
    program = Program.from_label(label)
    assert program.label == label
    assert type(program.config) is chunk.Config
