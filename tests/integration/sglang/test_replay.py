"""Verify by replay in SGLang's own pool, dispatcher and update after verify, in a process of its own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.gate_engine import Evidence
from tests.integration import frameworks
from tests.integration.sglang.replay_driver import ROUNDS

ROOT = Path(__file__).resolve().parents[3]
#: both paths round a result once from fp32: in bf16 now and then to the other neighbour
SAME = {"torch.bfloat16": 1e-3, "torch.float32": 1e-5}


@functools.cache
def drive(wrong: str = "") -> dict[str, Any]:
    try:
        frameworks.folder("sglang-0.5.23")
    except frameworks.Absent as reason:
        pytest.skip(str(reason))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.integration.sglang.replay_driver", folder, wrong]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.partition("RESULT")[2])
    return result


@pytest.mark.criterion("6.6")
@pytest.mark.parametrize("dtype", SAME)
def test_pool_after_random_acceptance(dtype: str, evidence: Evidence) -> None:
    result = drive()
    seen = result[dtype]
    evidence.at_most("relative L2 difference of outputs to the path with snapshots", seen["output"], 1e-3)
    evidence.at_most("relative L2 difference of committed and tracked states to it", seen["state"], SAME[dtype])
    evidence.equal("values that verify wrote to the pool", seen["verify wrote"], 0)
    evidence.equal("values of other slots, or of rejected requests, that changed", seen["elsewhere"], 0)
    evidence.equal("states that SGLang's own scatter copied", result["stock states"], 0)
    evidence.equal("times that it scattered convolution windows", result["conv"], 2 * ROUNDS)


@pytest.mark.criterion("6.6")
def test_no_snapshots_are_allocated(evidence: Evidence) -> None:
    result = drive()
    assert result["kept"]["type"] == "Tape"
    evidence.at_most("bytes kept over bytes of snapshots", result["kept"]["bytes"] / result["kept"]["snapshots"], 0.1)
    assert sum("verify by replay" in line for line in result["lines"]) >= 1


@pytest.mark.criterion("6.5", "6.6")
def test_a_pool_that_cannot_be_replayed_keeps_its_snapshots() -> None:
    result = drive()
    assert result["plain"] == {"tree": "Tensor", "steps": "Tensor", "no drafts": "NoneType"}
    for reason in ("draft tokens form a tree", "17 draft tokens"):
        assert sum("keeps snapshots" in line and reason in line for line in result["lines"]) == 1


@pytest.mark.criterion("6.7")
@pytest.mark.parametrize("wrong", ("no commit", "one more"))
def test_a_wrong_commit_is_seen(wrong: str, evidence: Evidence) -> None:
    for dtype, limit in SAME.items():
        seen = drive(wrong)[dtype]
        evidence.at_least(f"relative L2 difference of states, {dtype}", seen["state"], 20 * limit)
