"""Claims that measured rows decide: by the ratio or the share that was measured, never by a missing or stale row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specs._render.bench_claims import SpeedDecision
from specs._render.ledger import Claim, ledger, load_ledger, parse_claim, verdict
from specs._render.reading import SiteError
from specs._render.records import Site
from tests.site.bench_samples import OURS, SEED, STALE, TRITON, row, site
from tests.site.samples import GATES

LEDGER = Path(__file__).resolve().parents[2] / "specs" / "ledger.yml"
CLAIM = {"claim": "it is fast", "number": "3x", "source": "a paper", "gate": 7, "reason": "because"}
FASTER = {"op": "verify-snapshots", "N": 64, "T": 12, "impl": "flashqla-*/gated", "than": "sglang-*/triton-verify"}
OPEN = "not yet measured"


def claim(faster: Any, if_true: str = "confirmed", if_false: str = "refuted") -> Claim:
    decided = {"faster": faster, "if_true": if_true, "if_false": if_false}
    return parse_claim(CLAIM | {"decided_by": decided}, "ledger.yml")


def said(faster: Any, *rows: dict[str, Any], **changes: Any) -> str:
    return verdict(site(*rows, **changes), claim(faster))[0]


@pytest.mark.parametrize(
    ("bound", "us", "expected"),
    [
        ({"at_least": 2.0}, 5.0, "confirmed"),  # 2.0: the bound itself holds
        ({"at_least": 2.0}, 5.1, "refuted"),
        ({"at_most": 2.0}, 5.0, "confirmed"),
        ({"at_most": 2.0}, 4.9, "refuted"),
        ({"at_least": 0.9, "at_most": 1.1}, 10.0, "confirmed"),
        ({"at_least": 0.9, "at_most": 1.1}, 12.0, "refuted"),
        ({"at_least": 0.9, "at_most": 1.1}, 8.0, "refuted"),
    ],
)
def test_a_ratio_decides(bound: dict[str, float], us: float, expected: str) -> None:
    assert said(FASTER | bound, row(SEED, us), row(TRITON, 10.0)) == expected


def test_the_basis_says_what_was_measured() -> None:
    found = verdict(site(row(SEED, 4.0), row(TRITON, 10.0)), claim(FASTER | {"at_least": 2.7}))
    assert found == (
        "refuted",
        "verify-snapshots, N = 64, T = 12, 16/32 heads, bf16: "
        "flashqla-066a214/gated 4.00 µs, sglang-0.5.23/triton-verify 10.0 µs: 2.50× (asked: at least 2.7×)",
    )


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(SEED, 4.0)],
        [row(TRITON, 10.0)],
        [row(SEED, 4.0), row(TRITON, None)],
        [row(SEED, 4.0), row(TRITON, 10.0, N=1)],
        [row(SEED, 4.0), row(TRITON, 10.0, pool="fp32")],
        [row(SEED, 4.0), row(TRITON, 10.0, cold=False)],
        [row(SEED, 4.0), row("sglang-0.5.23/triton-verify-no-pdl", 10.0)],
    ],
)
def test_without_both_rows_nothing_is_decided(rows: list[dict[str, Any]]) -> None:
    assert said(FASTER | {"at_least": 1}, *rows) == OPEN


def test_a_stale_or_missing_record_decides_nothing() -> None:
    rows = [row(SEED, 4.0), row(TRITON, 10.0)]
    decided = claim(FASTER | {"at_least": 1})
    assert verdict(site(*rows, sources=None), decided)[0] == "confirmed"
    assert verdict(site(*rows, sources=STALE), decided) == (OPEN, "the benchmark's record is stale")
    assert verdict(Site(GATES, (), None), decided) == (OPEN, "no benchmark run is recorded")


def test_a_local_run_decides_nothing() -> None:
    run = site(row(SEED, 4.0), row(TRITON, 10.0), recorded=False)
    assert run.local_bench and verdict(run, claim(FASTER | {"at_least": 1}))[0] == OPEN


def test_the_fastest_match_counts_on_both_sides() -> None:
    rows = [row("flashqla-1/gated", 8.0), row(SEED, 4.0), row("sglang-0.4/triton-verify", 30.0), row(TRITON, 10.0)]
    assert said(FASTER | {"at_least": 2.5, "at_most": 2.5}, *rows) == "confirmed"


def test_across_ops() -> None:
    faster = FASTER | {"op": "verify-replay", "impl": "*", "than_op": "verify-snapshots", "at_least": 2}
    rows = [row(TRITON, 10.0), row("x-1/replay", 5.0, op="verify-replay")]
    assert said(faster, *rows) == "confirmed"
    assert "(verify-snapshots)" in verdict(site(*rows), claim(faster))[1]
    assert said(faster, row(TRITON, 10.0), row(SEED, 4.0)) == OPEN
    assert said(faster, row(TRITON, 10.0), row("x-1/replay", 5.5, op="verify-replay")) == "refuted"


@pytest.mark.parametrize(("share", "expected"), [(0.9, "confirmed"), (0.89, "refuted")])
def test_a_share_of_the_ceiling(share: float, expected: str) -> None:
    alone = {"op": "verify-snapshots", "N": 64, "T": 12, "impl": OURS, "share_at_least": 0.9}
    both = alone | {"than": "flashqla-*/gated", "at_least": 1}
    rows = [row(OURS, 10.0, share=share), row(SEED, 12.0)]
    assert said(alone, rows[0]) == said(both, *rows) == expected
    assert f"{100 * share:.0f} % of its memory ceiling" in verdict(site(*rows), claim(both))[1]
    assert said(both, rows[0], row(SEED, 9.0)) == "refuted"
    assert said(alone, row(OURS, 10.0) | {"share": None}) == OPEN


def test_several_comparisons_must_all_hold() -> None:
    several = FASTER | {"N": [8, 64], "at_least": 1}
    rows = [row(impl, us, N=n) for n in (8, 64) for impl, us in ((SEED, 4.0), (TRITON, 10.0))]
    assert said(several, *rows) == "confirmed"
    assert said(several, *rows[:3]) == OPEN
    assert said(several, *rows[:3], row(TRITON, 3.0)) == "refuted"
    assert said([FASTER | {"at_least": 1}, FASTER | {"N": 8, "at_most": 1}], *rows) == "refuted"


def test_the_shape_has_defaults() -> None:
    other: dict[str, Any] = {"H": 16, "HV": 64, "pool": "fp32", "cold": False}
    rows = [row(SEED, 4.0, **other), row(TRITON, 10.0, **other)]
    assert said(FASTER | {"at_least": 1}, *rows) == OPEN
    assert said(FASTER | other | {"at_least": 1}, *rows) == "confirmed"


@pytest.mark.parametrize(
    ("faster", "text"),
    [
        ([], "no comparison"),
        ("fast", "a comparison has the keys"),
        (FASTER | {"atleast": 2}, "a comparison has the keys"),
        (FASTER, "'than' needs 'at_least' or 'at_most'"),
        ({"op": "decode", "N": 1, "T": 1, "impl": OURS}, "nothing is compared"),
        ({"op": "decode", "N": 1, "T": 1, "impl": OURS, "at_least": 1}, "they need 'than'"),
        ({"op": "decode", "N": 1, "T": 1, "impl": OURS, "share_at_least": 1, "than_op": "decode"}, "needs 'than'"),
        (FASTER | {"at_least": 1, "than_op": "verify"}, "must be an op"),
        (FASTER | {"at_least": 1, "op": "verify"}, "unknown op"),
        (FASTER | {"at_least": "2x"}, "must be a finite number"),
        (FASTER | {"at_least": None}, "must be a finite number"),
        (FASTER | {"at_least": 1, "N": None}, "'N' must be int"),
        (FASTER | {"at_least": 1, "N": []}, "no comparison"),
        (FASTER | {"at_least": 1, "impl": None}, "'impl' must be str"),
    ],
)
def test_a_comparison_that_cannot_be_made(faster: Any, text: str) -> None:
    with pytest.raises(SiteError, match=text) as error:
        claim(faster)
    assert "ledger.yml" in str(error.value)


@pytest.mark.parametrize(
    "decided",
    [
        {"faster": FASTER | {"at_least": 1}, "if_true": "confirmed"},
        {"faster": FASTER | {"at_least": 1}, "if_true": "yes", "if_false": "refuted"},
        {"faster": FASTER | {"at_least": 1}, "if_true": "confirmed", "if_false": "refuted", "if_pass": "confirmed"},
        {"faster": FASTER | {"at_least": 1}, "if_true": "confirmed", "if_false": "refuted", "criteria": ["7.1"]},
        "faster",
    ],
)
def test_a_speed_verdict_cannot_be_typed(decided: Any) -> None:
    with pytest.raises(SiteError, match=r"ledger\.yml"):
        parse_claim(CLAIM | {"decided_by": decided}, "ledger.yml")


def test_ledger_html() -> None:
    decided = claim(FASTER | {"at_least": 2}, if_true="refuted")
    html = ledger(site(row(SEED, 4.0), row(TRITON, 10.0)), {"Speed": [decided]})
    assert '<a href="bench.html">Benchmark</a>: verify-snapshots, N = 64' in html
    assert "2.50× (asked: at least 2×)" in html and "1 refuted" in html


def committed(title: str) -> Claim:
    (found,) = (item for claims in load_ledger(LEDGER).values() for item in claims if title in item.claim)
    assert isinstance(found.decided_by, SpeedDecision)
    return found


@pytest.mark.parametrize(
    ("title", "rows", "expected"),
    [
        ("One request", [row(SEED, 10.0, N=1), row(TRITON, 27.1, N=1)], "confirmed"),
        ("One request", [row(SEED, 10.0, N=1), row(TRITON, 9.0, N=1)], "refuted"),
        ("level with Triton", [row(SEED, 10.0, N=256), row(TRITON, 10.2, N=256)], "confirmed"),
        ("level with Triton", [row(SEED, 10.0, N=256), row(TRITON, 9.0, N=256)], "refuted"),
        ("physically impossible", [row("x-1/y", 4.0, N=256, op="verify-replay"), row(TRITON, 9.0, N=256)], "refuted"),
        ("physically impossible", [row("x-1/y", 5.0, N=256, op="verify-replay"), row(TRITON, 9.0, N=256)], "undecided"),
        ("compute-bound", [row(OURS, 9.0, N=256, share=0.95), row(SEED, 10.0, N=256)], "refuted"),
        ("compute-bound", [row(OURS, 9.0, N=256, share=0.85), row(SEED, 10.0, N=256)], "undecided"),
        ("compute-bound", [row(OURS, 11.0, N=256, share=0.95), row(SEED, 10.0, N=256)], "undecided"),
        ('"V2"', [row(i, us, N=n) for n in (1, 8, 64, 256) for i, us in ((OURS, 9.0), (SEED, 10.0))], "refuted"),
        ('"V2"', [row(i, us + n, N=n) for n in (1, 8, 64) for i, us in ((OURS, 9.0), (SEED, 10.0))], OPEN),
        ('"V2"', [row(i, us, N=n) for n in (1, 8, 64, 256) for i, us in ((OURS, 9.0), (SEED, 8.0))], "undecided"),
    ],
)
def test_the_committed_claims(title: str, rows: list[dict[str, Any]], expected: str) -> None:
    decided = committed(title)
    assert verdict(site(*rows), decided)[0] == expected
    assert verdict(site(*rows, sources=STALE), decided)[0] == OPEN
