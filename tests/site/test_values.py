"""Numbers in prose come from records, and verdicts on claims are computed from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specs._render.html import number
from specs._render.ledger import Claim, ledger, load_ledger, parse_claim, verdict
from specs._render.records import SiteError
from specs._render.values import expand, inline_value
from tests.site.samples import record, result, site

LABEL = "probes.x(N=8)"
CURRENT = {LABEL: "aaaa"}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ('gate0.cpu 0.1 "o rel L2"', ">1.70e-3<"),
        ('gate0.cpu 0.1 "o rel L2" limit', ">3.00e-3<"),
        ("gate0.cpu 0.1 verdict", ">pass<"),
        ("gate0.cpu date", "2026-01-02T03:04:05+00:00"),
        ("gate0.sm90 device", "not recorded"),
        ('gate0.sm90 0.1 "o rel L2"', "not recorded"),
        ('gate7.sm90 7.1 "us"', "not recorded"),
    ],
)
def test_value(expression: str, text: str) -> None:
    assert text in inline_value(site(record(), sources=CURRENT), expression)


@pytest.mark.parametrize(
    "expression",
    ["", "0.1", "gate0 0.1 x", "gate0.cpu", "gate0.cpu colour", 'gate0.cpu 0.1 "o', "gate0.cpu 0.1 typo",
     "gate0.cpu 0.7 x", "gate9.cpu 9.1 x", "gate0.cpu 0.1 a b c"],
)  # fmt: skip
def test_value_that_names_nothing(expression: str) -> None:
    with pytest.raises(SiteError):
        inline_value(site(record()), expression)


def test_a_value_that_is_not_a_pass_says_so() -> None:
    assert "STALE" in inline_value(site(record(), sources={LABEL: "bbbb"}), 'gate0.cpu 0.1 "o rel L2"')
    assert "freshness unknown" in inline_value(site(record()), 'gate0.cpu 0.1 "o rel L2"')
    not_run = record(criteria={"0.1": result("not-run")})
    assert "not recorded" in inline_value(site(not_run), 'gate0.cpu 0.1 "o rel L2"')


def test_code_is_left_alone() -> None:
    code = "`{{ b }}` ``{{ c }} ` {{ d }}``\n\n```text\n{{ e }}\n<!-- gates -->\n```"
    text = f"{{{{ a }}}} {code}\n\n{{{{ f }}}} <!-- gates --> <!-- x --> <!-- x-y -->"
    seen = expand(text, lambda value: f"[{value.strip()}]", {"gates": "G", "x-y": "H"}.get)
    assert seen == f"[a] {code}\n\n[f] G <!-- x --> H"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.69e-3, "1.69e-3"), (0.0, "0"), (0.25, "0.25"), (1234.5, "1234"), (2.5e6, "2.50e6"), (7, "7"),
     (True, "True"), ("HMMA", "HMMA"), (float("inf"), "inf"), (float("nan"), "nan")],
)  # fmt: skip
def test_number(value: Any, text: str) -> None:
    assert number(value) == text


CLAIM = {"claim": "it works", "number": "3x", "source": "a paper", "gate": 0, "reason": "because"}


def claim(if_pass: str | None = "confirmed") -> Claim:
    decided = {"decided_by": {"criteria": ["0.1"], "if_pass": if_pass}} if if_pass else {}
    return parse_claim(CLAIM | decided, "ledger.yml")


@pytest.mark.parametrize("if_pass", ["confirmed", "refuted", "superseded"])
def test_verdict_follows_from_the_record(if_pass: str) -> None:
    assert verdict(site(record(), sources=CURRENT), claim(if_pass))[0] == if_pass


@pytest.mark.parametrize(
    ("criteria", "sources", "said"),
    [
        ({}, CURRENT, "not yet measured"),
        ({"0.1": result("not-run")}, CURRENT, "not yet measured"),
        ({"0.1": result()}, {LABEL: "bbbb"}, "not yet measured"),
        ({"0.1": result("fail")}, CURRENT, "undecided"),
    ],
)
def test_no_verdict_without_a_fresh_pass(criteria: dict[str, Any], sources: dict[str, str], said: str) -> None:
    assert verdict(site(record(criteria=criteria), sources=sources), claim())[0] == said


def test_one_failing_machine_leaves_a_claim_undecided() -> None:
    both = site(record(), record("sm90", criteria={"0.1": result("fail")}), sources=CURRENT)
    assert verdict(both, claim()) == ("undecided", "criterion 0.1 fails (GPU, recorded)")


@pytest.mark.parametrize(
    ("second", "said"), [("pass", "refuted"), ("not-run", "not yet measured"), ("fail", "undecided")]
)
def test_several_criteria_decide_together(second: str, said: str) -> None:
    both = parse_claim(CLAIM | {"decided_by": {"criteria": ["0.1", "0.2"], "if_pass": "refuted"}}, "ledger.yml")
    run = record(criteria={"0.1": result(), "0.2": result(second)})
    assert verdict(site(run, sources=CURRENT), both)[0] == said


def test_a_claim_that_nothing_decides_is_not_yet_measured() -> None:
    assert verdict(site(record()), claim(None)) == ("not yet measured", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "confirmed"},
        {"decided_by": {"criteria": ["0.1"], "if_pass": "true"}},
        {"decided_by": {"criteria": ["0.1"]}},
        {"decided_by": {"criteria": [], "if_pass": "refuted"}},
        {"decided_by": {"criteria": ["7.1"], "if_pass": "refuted"}},
        {"gate": "0"},
    ],
)
def test_a_verdict_cannot_be_typed(changes: dict[str, Any]) -> None:
    with pytest.raises(SiteError, match=r"ledger\.yml"):
        parse_claim(CLAIM | changes, "ledger.yml")


def test_a_criterion_that_no_page_lists_is_an_error() -> None:
    bad = parse_claim(CLAIM | {"decided_by": {"criteria": ["0.9"], "if_pass": "refuted"}}, "ledger.yml")
    with pytest.raises(SiteError, match=r"no criterion 0\.9"):
        verdict(site(), bad)


def test_ledger_html(tmp_path: Path) -> None:
    path = tmp_path / "ledger.yml"
    path.write_text(
        "Speed:\n- {claim: '<b>fast', number: 3x, source: s, gate: 7, reason: 'got {{ gate0.cpu 0.1 \"o rel L2\" }}'}\n"
    )
    html = ledger(site(record(), sources=CURRENT), load_ledger(path))
    assert "## Speed" in html and "1 not yet measured" in html and "Gate 7 (planned) decides." in html
    assert "<b>" not in html and "&lt;b&gt;fast" in html
    assert "got <span" in html and "1.70e-3" in html
