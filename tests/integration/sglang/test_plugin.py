"""The plugin inside SGLang's own Python files, each case in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gate_engine import Evidence
from tests.integration import frameworks

ROOT = Path(__file__).resolve().parents[3]
#: o and states are stored in bf16, whose rounding alone is 1.7e-3 in relative L2
LIMIT = 2.5e-3
_results: dict[tuple[str, str], dict[str, Any]] = {}


def drive(folder: Path, choice: str, wrong: str = "") -> dict[str, Any]:
    """What driver.py found, once for each pair of arguments."""
    try:
        frameworks.folder("sglang-0.5.23")
    except frameworks.Absent as reason:
        pytest.skip(str(reason))
    if (choice, wrong) not in _results:
        command = [sys.executable, "-m", "tests.integration.sglang.driver", choice, str(folder), wrong]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        _results[choice, wrong] = json.loads(done.stdout.partition("RESULT")[2])
    return _results[choice, wrong]


@pytest.mark.criterion("6.1", "6.2")
@pytest.mark.parametrize("choice", ("flag", "variable"))
def test_the_loader_finds_it_and_the_dispatcher_has_it(tmp_path: Path, choice: str, evidence: Evidence) -> None:
    result = drive(tmp_path, choice)
    evidence.equal("times that the choice is offered", result["choices"], 1)
    kernels = [result[name] for name in ("decode_kernel", "verify_kernel", "extend_kernel", "tree_verify_kernel")]
    assert kernels == ["HopperGDNKernel", "HopperGDNKernel", "TritonGDNKernel", "TritonGDNKernel"]
    assert result["packed"] and result["strided"]
    said = "--linear-attn-decode-backend" if choice == "flag" else "HOPPER_GDN_SGLANG"
    assert said in result["lines"][0]


@pytest.mark.criterion("6.2")
def test_what_sglang_refuses_stays_refused(tmp_path: Path, evidence: Evidence) -> None:
    stock = drive(tmp_path, "nothing")["refused"]
    evidence.equal("backends that the stock dispatcher refuses", len(stock), 4)
    for choice in ("flag", "variable"):
        evidence.equal("the same errors", drive(tmp_path, choice)["refused"] == stock, True)


@pytest.mark.criterion("6.1")
def test_without_a_choice_nothing_changes(tmp_path: Path) -> None:
    result = drive(tmp_path, "nothing")
    assert {result[name] for name in ("decode_kernel", "verify_kernel", "extend_kernel")} == {"TritonGDNKernel"}
    assert result["lines"] == []


@pytest.mark.criterion("6.3")
@pytest.mark.parametrize("choice", ("flag", "variable"))
def test_calls_equal_fp64(tmp_path: Path, choice: str, evidence: Evidence) -> None:
    result = drive(tmp_path, choice)
    evidence.equal("arguments that were copied or changed", result["moved"], 0)
    for what in ("verify", "states", "decode", "decoded", "plain decode", "plainly decoded"):
        evidence.at_most(f"relative L2 error, {what}", result[what], LIMIT)
    assert result["shape"] == [1, 4, 6, 16]


@pytest.mark.criterion("6.4")
def test_padding_duplicates_and_garbage(tmp_path: Path, evidence: Evidence) -> None:
    result = drive(tmp_path, "flag")
    evidence.equal("outputs of a padded row of NaN that are not zero", result["padded"], 0)
    evidence.equal("states stored for it", result["padded states"], 0)
    evidence.equal("values of the pool that verify changed", result["pool"], 0)
    evidence.equal("values that decode changed in slots of nobody", result["untouched"], 0)


@pytest.mark.criterion("6.5")
def test_what_is_refused_runs_the_stock_kernel(tmp_path: Path, evidence: Evidence) -> None:
    """A tree, ring arguments and int64 indices, each twice: six stock calls, and a line for each reason."""
    result = drive(tmp_path, "flag")
    evidence.equal("calls that reached the stock kernel", result["reached"], 6)
    lines = result["lines"][1:]
    evidence.equal("lines", len(lines), 3)
    for call, reason in (("decode", "int64"), ("verify", "retrieve_parent_token"), ("packed decode", "ReplaySSM")):
        assert sum(f"GDN {call} runs the stock" in line and reason in line for line in lines) == 1


@pytest.mark.criterion("6.7")
@pytest.mark.parametrize("wrong", ("gates", "slot"))
def test_a_wrong_adapter_is_seen(tmp_path: Path, wrong: str, evidence: Evidence) -> None:
    evidence.at_least("relative L2 error of a wrong adapter", drive(tmp_path, "flag", wrong)["verify"], 20 * LIMIT)
