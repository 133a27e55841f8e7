"""The divergence chart: what its record must hold, and that it shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specs._render.drift import drift_report, load_drift, round_step
from specs._render.reading import SiteError


def data(**changes: Any) -> dict[str, Any]:
    curves = {"stock": [2e-3, 4e-3], "chunk": [1e-3, 3e-3], "lossless": [0.0, 0.0]}
    return {"date": "2026-01-01T00:00:00+00:00", "torch": "2.0", "block": 12, "curves": curves, **changes}


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_chart_says_its_numbers(tmp_path: Path) -> None:
    html = drift_report(written(tmp_path / "drift.json", data()))
    assert "After 24 tokens in blocks of 12: L exactly 0, C 0.30 %, S 0.40 %." in html
    assert html.count('<path class="line"') == 6  # three curves, three swatches
    assert "2026-01-01" in html and "torch 2.0" in html


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"curves": {"stock": [1e-3], "chunk": [1e-3]}}, "lossless"),
        ({"curves": {"stock": [1e-3], "chunk": [1e-3], "lossless": [0.0, 0.0]}}, "one length"),
        ({"curves": {"stock": [1e-3], "chunk": [1e-3], "lossless": []}}, "finite"),
        ({"curves": {"stock": [1e-3], "chunk": [-1e-3], "lossless": [0.0]}}, "finite"),
        ({"curves": {"stock": [1e-3], "chunk": ["x"], "lossless": [0.0]}}, "finite"),
        ({"block": 0}, "block"),
        ({"date": "yesterday"}, "date"),
    ),
)
def test_a_damaged_record_stops_the_build(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=words) as error:
        load_drift(written(tmp_path / "drift.json", data(**changes)))
    assert "drift.json" in str(error.value)


@pytest.mark.parametrize(("high", "step"), ((1008, 200), (0.0115, 0.002), (5, 1), (5.5e-5, 1e-5), (6e-5, 2e-5)))
def test_round_steps(high: float, step: float) -> None:
    assert round_step(high) == pytest.approx(step)
