"""What was measured on other code is STALE, what did not run is not run: neither is ever a pass."""

from __future__ import annotations

import re

import pytest

from specs._render.freshness import freshness, label_state, outcome, summary
from specs._render.outcomes import gate_outcomes, overview
from specs._render.records import Record, Site
from tests.site.samples import data, evidence, record, result, site

LABEL = "probes.x(N=8)"
LATER = "2026-02-01T00:00:00+00:00"
PASS_BADGE = re.compile(r"badge-pass|>pass\b")


@pytest.mark.parametrize(
    ("sources", "state", "whole"),
    [
        ({LABEL: "aaaa"}, "current", "current"),
        ({LABEL: "bbbb"}, "differs", "stale"),
        ({"probes.y()": "aaaa"}, "gone", "stale"),
        (None, "unknown", "unknown"),
    ],
)
def test_against_what_the_checkout_generates(sources: dict[str, str] | None, state: str, whole: str) -> None:
    run = record("sm90")
    assert label_state(site(run, sources=sources), run, LABEL) == state
    assert freshness(site(run, sources=sources), run) == whole


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("sha", "date", "whole"),
    [
        ("bbbb", LATER, "stale"),
        ("bbbb", data()["date"], "stale"),  # the same moment: both cannot be right
        ("bbbb", "2025-01-01", "unknown"),  # only an older record differs: nothing newer was seen
        ("aaaa", LATER, "current"),
    ],
)
def test_against_other_records(recorded: bool, sha: str, date: str, whole: str) -> None:
    run = record("sm90")
    other = record("cpu", recorded=recorded, sources={LABEL: sha}, date=date)
    assert freshness(site(run, other), run) == whole


def test_a_newer_record_counts_even_if_the_checkout_agrees() -> None:
    run, other = record("sm90"), record("cpu", sources={LABEL: "bbbb"}, date=LATER)
    assert freshness(site(run, other, sources={LABEL: "aaaa"}), run) == "stale"


def test_one_stale_source_of_many_is_enough() -> None:
    run = record(sources={LABEL: "aaaa", "probes.y()": "cccc"})
    assert freshness(site(run, sources={LABEL: "aaaa", "probes.y()": "dddd"}), run) == "stale"


def test_without_sources_nothing_goes_stale() -> None:
    run = record(sources={})
    assert freshness(site(run, sources={}), run) == "none"
    assert outcome(site(run, sources={}), run, "0.1").status == "pass"


def stale_site() -> tuple[Site, Record]:
    run = record("sm90")
    return site(run, sources={LABEL: "bbbb"}), run


def test_a_stale_pass_is_nowhere_a_pass() -> None:
    stale, run = stale_site()
    assert outcome(stale, run, "0.1").status == "stale"
    assert summary(stale, run, 0) == ("stale", "STALE 2 of 2", "")
    for html in (gate_outcomes(stale, 0, "../"), overview(stale)):
        assert "STALE" in html
        assert not PASS_BADGE.search(html)


def test_a_stale_failure_still_says_that_it_failed() -> None:
    run = record("sm90", criteria={"0.1": result("fail"), "0.2": result()})
    assert "STALE (failed)" in gate_outcomes(site(run, sources={LABEL: "bbbb"}), 0, "../")


@pytest.mark.parametrize("sources", [{LABEL: "aaaa"}, {LABEL: "bbbb"}, None])
def test_not_run_is_never_a_pass(sources: dict[str, str] | None) -> None:
    run = record(criteria={"0.1": result("not-run"), "0.2": result("not-run", 0)})
    not_run = site(run, sources=sources)
    assert outcome(not_run, run, "0.1").status == "not-run"
    for html in (gate_outcomes(not_run, 0, "../"), overview(not_run)):
        assert "not run here" in html
        assert not PASS_BADGE.search(html)


@pytest.mark.parametrize(
    ("second", "status", "text"),
    [
        (result("not-run"), "partial", "1 of 2 pass"),
        (None, "partial", "1 of 2 pass"),
        (result("fail"), "fail", "FAIL 1 of 2"),
        (result(), "pass", "pass 2 of 2"),
    ],
)
def test_a_gate_passes_only_as_a_whole(second: dict[str, object] | None, status: str, text: str) -> None:
    criteria = {"0.1": result()} | ({"0.2": second} if second else {})
    run = record(criteria=criteria)
    assert summary(site(run, sources={LABEL: "aaaa"}), run, 0)[:2] == (status, text)


def test_missing_record_and_missing_criterion() -> None:
    assert outcome(site(), None, "0.1").status == "missing"
    assert summary(site(), None, 0) == ("missing", "no record", "")
    run = record(criteria={"0.1": result()})
    assert outcome(site(run), run, "0.2").status == "missing"
    html = gate_outcomes(site(), 0, "../")
    assert html.count("no record") == 6  # two criteria on three machines
    assert not PASS_BADGE.search(html)


def test_unknown_freshness_is_said_where_the_pass_is() -> None:
    unknown = site(record("sm90"))
    assert "freshness unknown" in gate_outcomes(unknown, 0, "../")
    assert "freshness unknown" in overview(unknown)


def test_planned_gate_and_criteria_that_no_page_lists() -> None:
    assert "planned" in overview(site())
    run = record(criteria={"0.9": result()})
    assert "unlisted" in gate_outcomes(site(run), 0, "../")


def test_html_of_a_record_is_escaped() -> None:
    attack = "<script>alert(1)</script>"
    item = evidence(name=attack, value=attack, limit=attack, relation="==", unit=attack)
    run = record(
        device=attack,
        commit=attack,
        versions={"torch": attack},
        sources={attack: attack},
        criteria={"0.1": result("pass", 1, item)},
    )
    html = gate_outcomes(site(run), 0, "../") + overview(site(run))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "<code>wgmma</code> &lt;is&gt; used" in html
