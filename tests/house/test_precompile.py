"""Compiling ahead: which programs the records name, and that they land in a cache without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.runtime import Program
from probes import toolchain
from tests import precompile
from tests.emulator.programs import staged

ROOT = Path(__file__).resolve().parents[2]
STAGED = Program(staged.__name__, staged.Config()).label


def record(folder: Path, name: str, *labels: str) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"sources": dict.fromkeys(labels, "")}))


def test_records_are_chosen_by_gate(tmp_path: Path) -> None:
    record(tmp_path, "gate2.cpu", "a(x=1)", "b(x=1)")
    record(tmp_path, "gate2.sm90", "b(x=1)", "c(x=1)")
    record(tmp_path, "gate20.sm90", "d(x=1)")
    record(tmp_path, "bench.sm90", "e(x=1)")
    assert precompile.named_by(["2"], tmp_path) == ["a(x=1)", "b(x=1)", "c(x=1)"]
    assert precompile.named_by(["20", "bench"], tmp_path) == ["d(x=1)", "e(x=1)"]
    assert len(precompile.named_by([], tmp_path)) == 5
    with pytest.raises(FileNotFoundError, match="no record '3'"):
        precompile.named_by(["3"], tmp_path)


def test_programs_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    try:
        toolchain.tool("nvcc")
    except toolchain.ToolMissing as error:
        pytest.skip(f"{error}: not run here")
    record(tmp_path, "gate2.cpu", STAGED, "no.such.module(x=1)")
    done = subprocess.run(
        [sys.executable, "-m", "tests.precompile", "2", "--folder", str(tmp_path), "--jobs", "1"],
        cwd=ROOT, env=os.environ | {"TILELANG_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 of 2 programs are in the disk caches" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "no.such.module(x=1): ValueError" in done.stderr
    assert len(list((tmp_path / "cache").rglob("executable.so"))) == 1
