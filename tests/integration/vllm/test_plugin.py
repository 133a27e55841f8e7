"""vLLM 0.33's own loader finds the plugin, its registry hands out the layer, and its layer's core runs ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

import integration.vllm
from tests.gate_engine import Evidence
from tests.integration import frameworks
from tests.integration.vllm.cases import ROUNDING, make

ROOT = Path(__file__).resolve().parents[3]
GROUP = "vllm.general_plugins"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What real_layer.py saw, with the entry points of pyproject.toml installed for it."""
    try:
        vllm = frameworks.folder("vllm-0.33.0")
    except frameworks.Absent as error:
        pytest.skip(str(error))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project.get("entry-points", {}).get(GROUP, {})
    place = tmp_path_factory.mktemp("installed")
    info = place / "stand_in-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{n} = {v}\n" for n, v in points.items()))
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.vllm.real_layer", str(vllm), str(place)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.criterion("6.23")
def test_off_until_asked_for(seen: dict[str, Any], evidence: Evidence) -> None:
    evidence.equal("vLLM's loader finds it", seen["found"].count("hopper_gdn"), 1)
    evidence.equal("without the variable nothing changes", seen["off"], True)
    evidence.equal("lines without it", seen["off lines"], [])


@pytest.mark.criterion("6.23")
def test_the_fused_op_stays_unless_it_is_turned_off(seen: dict[str, Any], evidence: Evidence) -> None:
    evidence.equal("with 1: layers in the registry, functions that are ours", seen["kept"], [0, [True, True]])


@pytest.mark.criterion("6.23")
def test_a_value_without_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(integration.vllm.SWITCH, "yes")
    with pytest.raises(ValueError, match="HOPPER_GDN_VLLM is 'yes', must be 0, 1 or unfused"):
        integration.vllm.register()


@pytest.mark.criterion("6.23")
def test_the_layer_is_replaced(seen: dict[str, Any], evidence: Evidence) -> None:
    evidence.equal("in vLLM's registry", seen["registered"], ["QwenGatedDeltaNetAttention"])
    evidence.equal("what the model's constructor makes", seen["class"], "HopperGatedDeltaNetAttention")
    evidence.equal("it is one of vLLM's layers", seen["is stock too"], True)
    evidence.equal("functions of the module that are ours", seen["names"], [True, True])


@pytest.mark.criterion("6.23")
@pytest.mark.parametrize("name", ("verify", "decode"))
def test_its_core_runs_ours(name: str, seen: dict[str, Any], evidence: Evidence) -> None:
    """The real `_forward_core`, with a convolution that does nothing, on the meaning of the call in fp64."""
    result = seen[name]
    limit = ROUNDING[make([1], None).pool.dtype] * 1.25
    evidence.at_most("o: worst relative L2 of a row", result["o"], limit)
    evidence.at_most("states: worst relative L2", result["states"], limit)
    evidence.equal("elements changed elsewhere", result["touched"], 0)
    evidence.equal("outputs of nobody", result["nobody"], 0)
    evidence.equal("calls of stock functions", result["stock calls"], [])
    evidence.equal("vLLM's fused op is chosen, by the stock layer and now", result["fused"], [name == "verify", False])
    evidence.equal("lines that say so", sum("runs hopper-gdn" in line for line in seen["lines"]), 2)


@pytest.mark.criterion("6.23")
def test_unsupported_is_stock_with_one_line(seen: dict[str, Any], evidence: Evidence) -> None:
    result = seen["unsupported"]
    evidence.equal("stock calls", result["stock calls"], ["fused_sigmoid_gating_delta_rule_update"] * 3)
    evidence.equal("lines", len(result["lines"]), 1)
    evidence.equal("with the reason", "stock path: slot_table has 17 columns" in result["lines"][0], True)


@pytest.mark.criterion("6.23")
def test_without_vllm_it_says_so(evidence: Evidence, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """An import of vLLM's layer that fails, as another version's would, stops nobody."""
    monkeypatch.setenv(integration.vllm.SWITCH, "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    integration.vllm.register()
    evidence.equal("lines", ["cannot be imported" in record.getMessage() for record in caplog.records], [True])
