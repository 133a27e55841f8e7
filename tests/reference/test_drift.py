"""Gate 3: the recorded divergence of verify from decode is what the references compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specs._render.drift import load_drift
from tests.gate_engine import Evidence
from tests.reference import drift

BLOCKS = 20


@pytest.mark.criterion("3.36")
def test_the_record_is_what_the_references_compute(evidence: Evidence) -> None:
    recorded = load_drift(drift.RECORD)
    assert recorded.block == drift.BLOCK and len(recorded.tokens) == drift.BLOCKS
    for name, computed in drift.compute(BLOCKS).items():
        curve = recorded.curves[name][:BLOCKS]
        if name == "lossless":
            evidence.equal("blocks at which lossless differs from decode", sum(x != 0 for x in computed), 0)
            evidence.equal("recorded blocks at which it differs", sum(x != 0 for x in recorded.curves[name]), 0)
            continue
        # another CPU adds in another order: that moves one rounding in ten thousand, and the distance by as little
        off = max(abs(x - y) / y for x, y in zip(computed, curve, strict=True))
        evidence.at_most(f"{name}: largest relative deviation from the record", off, 0.02)
    evidence.at_least("recorded tokens", recorded.tokens[-1], 1000)


@pytest.mark.criterion("3.36")
def test_recording_is_explicit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "RECORD", tmp_path / "drift.json")
    monkeypatch.setattr(drift, "compute", lambda: {name: [1e-3, 0.0] for name in ("stock", "chunk", "lossless")})
    drift.main([])
    assert not drift.RECORD.exists()
    drift.main(["--record"])
    assert load_drift(drift.RECORD).curves["stock"] == (1e-3, 0.0)
    assert json.loads(drift.RECORD.read_text())["block"] == drift.BLOCK
