"""The chart of the ring's error: what its record must hold, and that it shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specs._render.reading import SiteError
from specs._render.ring_drift import ENGINES, load_ring_drift, ring_drift_report

#: engine -> mean of each of two spans; a peak is twice as high
MEANS = {"ring": [1e-3, 2e-3], "commit": [3e-3, 4e-3], "decode": [5e-3, 0.0]}


def curves(factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {**{name: [factor * x for x in values] for name, values in MEANS.items()}, **changes}


def data(**changes: Any) -> dict[str, Any]:
    sizes = {"tokens": 2000, "span": 1000, "block": 3, "capacity": 12}
    made = {"date": "2026-01-01T00:00:00+00:00", "torch": "2.0", "curves": curves(), "peaks": curves(2.0)}
    return {**made, **sizes, **changes}


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_chart_says_its_numbers(tmp_path: Path) -> None:
    html = ring_drift_report(written(tmp_path / "ring-drift.json", data()))
    assert "last 1,000 of 2,000 tokens, accepted in blocks of 1 to 3, with a history of up to 12: " in html
    assert "R 0.20 % (at most 0.40 %), C 0.40 % (at most 0.80 %), D exactly 0 (at most exactly 0)." in html
    assert html.count('<path class="line"') == 6  # three curves, three swatches
    assert 'id="ring-drift-title"' in html and "2026-01-01" in html and "torch 2.0" in html


def test_the_last_tokens_are_several_spans(tmp_path: Path) -> None:
    values = [8e-3, *([1e-3, 3e-3] * 2)]
    listed = dict.fromkeys(ENGINES, values)
    drift = load_ring_drift(written(tmp_path / "x.json", data(tokens=1250, span=250, curves=listed, peaks=listed)))
    assert drift.last("ring") == (pytest.approx(2e-3), 3e-3)
    assert drift.tokens == [250, 500, 750, 1000, 1250]


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"curves": {"ring": [1e-3, 1e-3], "commit": [1e-3, 1e-3]}}, "decode"),
        ({"peaks": {}}, "peaks.*ring"),
        ({"curves": curves(more=[1e-3, 1e-3])}, "the curves ring, commit, decode"),
        ({"peaks": curves(ring=[1e-3])}, "one length"),
        ({"peaks": {name: [1e-3] for name in ENGINES}}, "1 spans of 1000"),
        ({"curves": curves(ring=[])}, "finite"),
        ({"curves": curves(ring=[1e-3, -1e-3])}, "finite"),
        ({"peaks": curves(ring=[1e-3, float("nan")])}, "finite"),
        ({"curves": curves(ring=[1e-3, "x"])}, "finite"),
        ({"tokens": 3000}, "are not 3000 tokens"),
        ({"tokens": 500, "span": 250}, "no last 1000"),
        ({"span": 300}, "no last 1000"),
        ({"span": 0}, "span"),
        ({"block": 0}, "block"),
        ({"capacity": "16"}, "capacity"),
        ({"date": "yesterday"}, "date"),
        ({"torch": None}, "torch"),
    ),
)
def test_a_damaged_record_stops_the_build(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=words) as error:
        load_ring_drift(written(tmp_path / "ring-drift.json", data(**changes)))
    assert "ring-drift.json" in str(error.value)


def test_a_missing_record_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"ring-drift\.json"):
        ring_drift_report(tmp_path / "ring-drift.json")
