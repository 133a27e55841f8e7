"""What was asked of decode: claims of the ledger that rows decide, and host costs beside their aim on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specs._render.bench import Shape
from specs._render.bench_page import bench_report
from specs._render.bench_tables import starts_table
from specs._render.ledger import Claim, load_ledger, parse_claim, verdict
from specs._render.reading import SiteError
from tests.bench.ours import ours
from tests.bench.shapes import chosen
from tests.site.bench_samples import STALE, bench, row, site

LEDGER = Path(__file__).resolve().parents[2] / "specs" / "ledger.yml"
OPEN = "not yet measured"
DECODE, PACKED, DENSE = "kernels/decode", "kernels/decode-packed", "kernels/decode-dense"
PEER, FLA = "sglang-0.5.23/triton-packed", "fla-0.6.0/fused-recurrent"


def targets() -> list[Claim]:
    return load_ledger(LEDGER)["Targets"]


def target(title: str) -> Claim:
    (found,) = (claim for claim in targets() if title in claim.claim)
    return found


def decode(impl: str = DECODE, us: float = 10.0, N: int = 64, **changes: Any) -> dict[str, Any]:
    return row(impl, us, op="decode", N=N, T=1, **changes)


def many(*rows: tuple[str, float, float], **changes: Any) -> list[dict[str, Any]]:
    """(impl, us, share) at N = 64 and 256, with bf16 and fp32 states."""
    wheres = [(N, pool) for N in (64, 256) for pool in ("bf16", "fp32")]
    return [decode(i, us, N, pool=pool, share=share) for N, pool in wheres for i, us, share in rows]


def dense(ours_us: float, fla_us: float = 20.0) -> list[dict[str, Any]]:
    wheres: list[dict[str, Any]] = [
        {"op": "decode-dense", "N": N, "T": T, "pool": "fp32"} for N in (1, 8, 64, 256) for T in (1, 8)
    ]
    return [row(impl, us, **where) for where in wheres for impl, us in ((DENSE, ours_us), (FLA, fla_us))]


@pytest.mark.parametrize(
    ("title", "rows", "expected"),
    [
        ("speed of memory", many((DECODE, 10.0, 0.97)), "confirmed"),
        ("speed of memory", many((DECODE, 10.0, 0.969)), "refuted"),
        ("speed of memory", many((DECODE, 11.0, 0.9), (PACKED, 10.0, 0.98)), "confirmed"),  # the fastest of ours
        ("speed of memory", many((DECODE, 10.0, 0.97))[:3], OPEN),  # fp32 at 256 is missing
        ("speed of memory", many((PEER, 10.0, 0.97)), OPEN),
        ("speed of memory", many((DENSE, 10.0, 0.97))[:2], OPEN),
        ("No peer", many((DECODE, 10.0, 0.9), (PEER, 10.0, 0.9)), "confirmed"),
        ("No peer", many((DECODE, 10.0, 0.9), (PEER, 9.9, 0.9)), "refuted"),
        ("No peer", many((DECODE, 10.0, 0.9), (PEER, 10.0, 0.9), ("x-1/y", 9.0, 0.9)), "refuted"),  # the best peer
        ("No peer", many((DECODE, 10.0, 0.9), (PACKED, 9.0, 0.9)), OPEN),  # ours are no peers
        ("No peer", [*many((DECODE, 10.0, 0.9), (PEER, 10.0, 0.9))[:7]], OPEN),
        ("8 requests", [decode(us=10.0, N=8), decode(PEER, 11.5, N=8)], "confirmed"),
        ("8 requests", [decode(us=10.0, N=8), decode(PEER, 11.4, N=8)], "refuted"),
        ("8 requests", [decode(us=10.0, N=8, pool="fp32"), decode(PEER, 12.0, N=8, pool="fp32")], OPEN),
        ("one request", [decode(us=2.2, N=1), decode(PEER, 2.5, N=1)], "confirmed"),
        ("one request", [decode(us=2.21, N=1), decode(PEER, 3.5, N=1)], "refuted"),
        ("one request", [decode(us=2.2, N=1), decode(PEER, 2.4, N=1)], "refuted"),
        ("one request", [decode(us=2.2, N=1)], OPEN),
        ("dense states", dense(10.0), "confirmed"),
        ("dense states", dense(10.1), "refuted"),
        ("dense states", dense(1.0)[:-2] + dense(11.0)[-2:], "refuted"),  # at one shape alone
        ("dense states", dense(10.0)[:-1], OPEN),
    ],
)
def test_a_target_is_decided_by_rows(title: str, rows: list[dict[str, Any]], expected: str) -> None:
    assert verdict(site(*rows), target(title))[0] == expected
    assert verdict(site(*rows, sources=STALE), target(title))[0] == OPEN


def test_the_basis_says_what_was_asked() -> None:
    said = verdict(site(decode(us=2.4, N=1), decode(PEER, 2.64, N=1)), target("one request"))
    assert said == (
        "refuted",
        f"decode, N = 1, T = 1, 16/32 heads, bf16: {DECODE} 2.40 µs, {PEER} 2.64 µs: 1.10× (asked: at least 1.1×), "
        f"{DECODE} 2.40 µs (asked: at most 2.2 µs)",
    )


def test_targets_ask_for_what_a_quick_run_measures() -> None:
    """A shape or a name that no run produces would leave a target open for ever."""
    measured = {
        Shape(s.op, s.N, s.T, s.H, s.HV, s.pool, s.cold): {i.name for i in ours() if s.op in i.ops}
        for s in chosen(False)
    }
    for claim in targets():
        for comparison in claim.decided_by.comparisons:  # type: ignore[union-attr]
            names = measured[comparison.shape]
            assert any(bench(decode(name)).fastest(Shape("decode", 64, 1), comparison.impl) for name in names)


def test_microseconds_are_a_bound_of_their_own() -> None:
    alone = {"op": "decode", "N": 64, "T": 1, "impl": DECODE, "us_at_most": 10}
    decided = {"if_true": "confirmed", "if_false": "refuted"}
    fields = {"claim": "c", "number": "n", "source": "s", "gate": 7, "reason": "r"}
    claim = parse_claim(fields | {"decided_by": decided | {"faster": alone}}, "ledger.yml")
    assert verdict(site(decode(us=10.0)), claim)[0] == "confirmed"
    assert verdict(site(decode(us=10.1)), claim)[0] == "refuted"
    assert verdict(site(decode(PEER, 1.0)), claim)[0] == OPEN
    with pytest.raises(SiteError, match="us_at_most"):
        parse_claim(fields | {"decided_by": decided | {"faster": alone | {"us_at_most": "10"}}}, "ledger.yml")


def start(impl: str, value: float | None, what: str = "eager-call", unit: str = "us") -> dict[str, Any]:
    return {"impl": impl, "what": what, "value": value, "unit": unit, "note": "a note"}


@pytest.mark.parametrize(
    ("cost", "asked"),
    [
        (start(DECODE, 8.0), 'at most 8 µs <span class="badge badge-pass">met</span>'),
        (start(PACKED, 8.1), 'at most 8 µs <span class="badge badge-fail">NOT MET</span>'),
        (start(DENSE, 30.0), 'at most 8 µs <span class="badge badge-fail">NOT MET</span>'),
        (start(DECODE, None), "at most 8 µs"),
        (start("kernels/verify", 80.0), ""),
        (start(PEER, 40.0), ""),
        (start(DECODE, 3.0, "peak-memory", "MiB"), ""),
    ],
)
def test_a_host_cost_stands_beside_what_was_asked(cost: dict[str, Any], asked: str) -> None:
    html = starts_table(bench(row(), starts=[cost]))
    assert f'data-label="Asked"><div>{asked}</div>' in html


def test_dense_states_are_shown_in_fp32() -> None:
    """A section of their own, with charts and a table of the fp32 rows."""
    html = bench_report(site(*dense(10.0), decode(), decode(PEER)))
    section = html[html.index("### decode-dense") : html.index("## All rows")]
    assert "16/32 heads, cold fp32 states" in section and "T = 8: time of each peer over ours" in section
    assert "16/32 heads, cold bf16 states" in html[: html.index("### decode-dense")]
