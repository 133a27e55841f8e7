"""A file that cannot be trusted stops the build and is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specs._render.records import SiteError, load_gates, load_site, parse_record
from tests.site.samples import data, evidence, result

PAGE = '---\ntitle: "Gate 0"\ngate: 0\nsession: gate0\ncriteria:\n  "0.1": compiles\n---\n'


def make_specs(root: Path, page: str = PAGE) -> Path:
    specs = root / "specs"
    (specs / "gates").mkdir(parents=True)
    (specs / "results").mkdir()
    (specs / "gates.yml").write_text("0: {session: x, proves: primitives}\n7: {session: bench, proves: speed}\n")
    (specs / "gates" / "gate0.md").write_text(page)
    return specs


def test_load(tmp_path: Path) -> None:
    specs, local = make_specs(tmp_path), tmp_path / ".gates"
    assert load_site(specs, local).sources is None
    (specs / "results" / "gate0.sm90.json").write_text(json.dumps(data("sm90")))
    local.mkdir()
    (local / "gate0.cpu.json").write_text(json.dumps(data()))
    (local / "sources.json").write_text('{"probes.x(N=8)": "aaaa"}')
    site = load_site(specs, local)
    assert [(r.machine, r.recorded) for r in site.records] == [("sm90", True), ("cpu", False)]
    assert site.sources == {"probes.x(N=8)": "aaaa"}
    assert site.gate(0).session == "gate0" and site.gate(0).criteria == {"0.1": "compiles"}
    assert site.gate(7).page is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"gate": 0}', "\udcff"])
def test_corrupt_record_is_named(tmp_path: Path, text: str) -> None:
    specs = make_specs(tmp_path)
    (specs / "results" / "gate0.cpu.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SiteError, match=r"gate0\.cpu\.json"):
        load_site(specs, tmp_path / ".gates")


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 1}'])
def test_corrupt_source_list_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sources.json").write_text(text)
    with pytest.raises(SiteError, match=r"sources\.json"):
        load_site(make_specs(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate": 1}, "what the file is called"),
        ({"machine": "sm100"}, "what the file is called"),
        ({"gate": True}, "'gate' must be int"),
        ({"date": "yesterday"}, "not an ISO date"),
        ({"versions": {"torch": 2}}, "object of strings"),
        ({"sources": {"x": None}}, "object of strings"),
        ({"criteria": []}, "'criteria' must be dict"),
        ({"criteria": {"0.1": result("passed")}}, "unknown verdict 'passed'"),
        ({"criteria": {"0.1": result("pass", 0)}}, "a pass that no test made"),
        ({"criteria": {"0.1": result("pass", 1, evidence(value=4e-3))}}, "says pass, but o rel L2"),
        ({"criteria": {"0.1": result("pass", 1, evidence(value=float("nan")))}}, "says pass, but"),
        ({"criteria": {"0.1": result("pass", 1, evidence(relation=">="))}}, "says pass, but"),
        ({"criteria": {"0.1": result("pass", 1, evidence(relation="=="))}}, "says pass, but"),
        ({"criteria": {"0.1": result("pass", 1, evidence(relation="<"))}}, "unknown relation"),
        ({"criteria": {"0.1": result("pass", 1, evidence(value="fast"))}}, "needs a number"),
    ],
)
def test_record_that_contradicts_itself(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SiteError, match=said) as error:
        parse_record(data() | changes, "results/gate0.cpu.json", recorded=True)
    assert "gate0.cpu.json" in str(error.value)


def test_date_forms() -> None:
    for date in ("2026-01-02", "2026-01-02T00:00:00Z", "2026-01-02T01:00:00+01:00"):
        when = parse_record(data(date=date), "gate0.cpu.json", recorded=True).when
        assert when.timestamp() == 1767312000


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("# no front matter\n", "no front matter"),
        (PAGE.replace("gate: 0", "gate: 1"), "front matter says gate 1"),
        (PAGE.replace('"0.1"', "0.1"), "quote the criteria"),
        (PAGE.replace("compiles", "{"), "not readable as YAML"),
    ],
)
def test_gate_page_that_cannot_be_read(tmp_path: Path, page: str, said: str) -> None:
    with pytest.raises(SiteError, match=said):
        load_gates(make_specs(tmp_path, page))
