"""The tools that the probes' verdicts rest on, and that generated source is a fact of the commit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.runtime import Program, lower
from probes import register_budget, state_gemm, strided_rows, toolchain
from tests.gate_engine import Evidence

ROOT = Path(__file__).resolve().parents[2]
SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n'


@pytest.mark.criterion("0.18")
def test_same_source_in_every_process(evidence: Evidence) -> None:
    programs = [
        Program("probes.state_gemm", state_gemm.Config(64)),
        Program("probes.strided_rows", strided_rows.Config(aligned=True)),
    ]
    script = (
        "import sys\nfrom kernels.runtime import Program, lower\n"
        "print(*(lower(Program.from_label(label)).sha256 for label in sys.argv[1:]))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.Popen(
        [sys.executable, "-c", script, *(program.label for program in programs)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    here = [lower(program).sha256 for program in programs]
    there = other.communicate()[0].split()
    assert other.returncode == 0
    evidence.equal("sources compared", len(there), len(programs))
    evidence.equal("sources that differ", sum(a != b for a, b in zip(here, there, strict=True)), 0)


@pytest.mark.criterion("0.19")
def test_forced_spills_are_seen(evidence: Evidence) -> None:
    source = lower(Program("probes.register_budget", register_budget.Config(64))).source
    bounds = "__launch_bounds__(128, 1)"
    assert bounds in source
    squeezed = toolchain.cubin(source.replace(bounds, "__launch_bounds__(128, 12)"))
    evidence.at_most("registers per thread, forced", toolchain.resources(squeezed).registers, 40)
    evidence.at_least("spilled bytes, forced", toolchain.resources(squeezed).spills, 1, "B")
    instructions = toolchain.sass(squeezed)
    evidence.at_least("local-memory instructions, forced", instructions.of("LDL") + instructions.of("STL"), 1)


@pytest.mark.criterion("0.19")
def test_a_program_meets_nvcc_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    monkeypatch.setattr(toolchain, "CACHE", tmp_path)
    first = toolchain.cubin(SOURCE)
    counts = toolchain.sass(first)
    assert (counts.of("LDG"), counts.of("STG"), counts.of("FADD") + counts.of("FMUL")) == (1, 1, 1)
    toolchain.nvcc_version()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a cached program was compiled or disassembled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert toolchain.cubin(SOURCE) == first
    assert toolchain.sass(first) == counts
    evidence.equal("files per program", len(list(tmp_path.iterdir())), 3)


@pytest.mark.criterion("0.19")
def test_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "CACHE", tmp_path)
    with pytest.raises(toolchain.CompileError, match="no_such_name"):
        toolchain.cubin(SOURCE.replace("2.0f", "no_such_name"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="one kernel"):
        toolchain.parse_ptxas("ptxas info    : 0 bytes gmem")


@pytest.mark.criterion("0.19")
@pytest.mark.parametrize("name", sorted(toolchain.REMEDY))
def test_a_missing_tool_names_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    toolchain.tool.cache_clear()
    try:
        with pytest.raises(toolchain.ToolMissing, match=f"{name} is neither .* pip install nvidia-cuda-{name}"):
            toolchain.tool(name)
    finally:
        toolchain.tool.cache_clear()


def test_listings_are_read() -> None:
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0090*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*00a0*/             @UP1  UIADD3 UR4, UR4, 0x1, URZ ;
        /*00b0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
    .L_x_1:
        /*00c0*/                   BRA `(.L_x_1);
    """
    counts = toolchain.parse_sass(listing)
    assert counts.total() == 5
    assert (counts.of("LDG", "128"), counts.of("LDG", "64"), counts.of("HGMMA", "64x32x16")) == (1, 0, 1)
