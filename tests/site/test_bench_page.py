"""The page of the benchmark: what was measured, what was not and why, and where a peer is faster."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specs._render.bench import Shape
from specs._render.bench_charts import ratio_axis, styles
from specs._render.bench_page import bench_report
from specs._render.bench_tables import LOSSES_SHOWN, losses
from specs._render.records import Site
from specs._render.svg import HEIGHT, LABEL_GAP, positions, spread_labels
from tests.site.bench_samples import OURS, SEED, STALE, TRITON, bench, grid, row, site, starts
from tests.site.samples import GATES

CSS = Path(__file__).resolve().parents[2] / "specs" / "assets" / "site.css"
PAGE = {"light": "#ffffff", "slate": "#1e2129"}
VOID = {"br", "input", "img", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed in its order; collects ids and local links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if name := found.get("id"):
            self.ids.append(name)
        href = found.get("href") or ""
        self.links += [href[1:]] if href.startswith("#") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole() -> str:
    return bench_report(site(*grid(), starts=starts()))


def rows_of(html: str, text: str) -> list[str]:
    return [found for found in re.findall(r"<tr.*?</tr>", html) if text in found]


def test_without_a_run_no_speed_is_claimed() -> None:
    html = bench_report(Site(GATES, (), None))
    assert "No benchmark run is recorded" in html
    assert "µs" not in html and "<svg" not in html


def test_html_is_balanced_and_links_lead_somewhere() -> None:
    html = whole()
    seen = Balanced()
    seen.feed(html)
    seen.close()
    assert seen.open == []
    assert len(seen.ids) == len(set(seen.ids))
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", html, re.MULTILINE)}
    assert set(seen.links) <= headings
    assert {"where-we-lose", "ceilings", "verify-snapshots", "decode", "all-rows", "outside-the-launch"} <= headings
    assert "\n\n\n" not in html


def test_who_measured() -> None:
    html = whole()
    for text in (
        "NVIDIA H200",
        "2026-01-02 03:04 UTC",
        "<code>0123456789</code>",
        "torch 2.11.0",
        "results/bench.sm90.json",
    ):
        assert text in html
    assert "STALE" not in html


def test_a_stale_run_says_so() -> None:
    html = bench_report(site(*grid(), sources=STALE))
    assert html.index(">STALE<") < html.index("Measured on")


def test_ceilings_and_starts() -> None:
    html = whole()
    assert "4000 GB/s" in html and "1.6 µs" in html and "bare <code>snapshots-12</code>" in html
    assert "host time of one eager call" in html and "21.5 µs" in html
    assert "not measured</span>" in html and "not measured for peers" in html


def test_every_row_is_in_the_full_table() -> None:
    html = whole()
    full = html[html.index("data-filters") :]
    assert len(re.findall(r"<tr(?: class=ours)?><td>", full[: full.index("</table>")])) == len(grid())
    assert f"All {len(grid())} rows" in html
    assert 'data-filters="op,N,T,heads,pool,states,implementation"' in html


def test_cells_of_a_row() -> None:
    html = bench_report(site(row(OURS, 10.0), row(TRITON, 12.5, share=0.4, note="with `pdl`")))
    (ours, *_), (peer, *_) = rows_of(html, OURS), rows_of(html, f"{TRITON}</code></td>")
    assert ours.startswith("<tr class=ours>") and peer.startswith("<tr><td>")
    for text in ("10.0", "2000", "50 %", "1.25×", "1.70e-3"):
        assert f"<td>{text}</td>" in ours
    for text in ("12.5", "1600", "40 %", "1.25×", "with <code>pdl</code>"):
        assert f"<td>{text}</td>" in peer


@pytest.mark.parametrize(
    ("note", "badge"),
    [
        ("not here: `vllm`", ">not here<"),
        ("wrong: o", ">WRONG<"),
        ("not supported: T", ">not supported<"),
        ("failed: oops", ">FAILED<"),
        ("out of time", ">not timed<"),
    ],
)
def test_a_row_without_a_time_says_why(note: str, badge: str) -> None:
    html = bench_report(site(row(), row(TRITON, None, note=note)))
    found = rows_of(html, f"<code>{TRITON}</code></td>")
    assert found and all(badge in each and "×" not in each and " %" not in each for each in found)
    assert "no time</li>" in html


def test_where_we_lose() -> None:
    html = losses(bench(*grid()))
    assert "On 8 of 20 shapes compared. 8 more were not timed on both sides." in html
    ratios = [float(x) for x in re.findall(r"<td>([\d.]+)×</td>", html)]
    assert ratios == sorted(ratios) and max(ratios) <= 1 and len(ratios) == 8
    assert f"{TRITON}</code> 3.50 µs" in html


def test_where_we_lose_is_not_cut_short() -> None:
    many = [
        row(impl, us, N=n) for n in range(1, LOSSES_SHOWN + 4) for impl, us in ((OURS, 10.0), (TRITON, 10.0 - n / 9))
    ]
    html = losses(bench(*many))
    assert "<summary>3 more</summary>" in html
    assert html.count("<code>kernels/") == LOSSES_SHOWN + 3


def test_nowhere_says_how_many_shapes() -> None:
    html = losses(bench(row(OURS, 10.0), row(TRITON, 10.0), row(N=1)))
    assert "on all 1 shapes compared" in html and "1 more" in html
    assert "nothing is compared" in losses(bench(row()))


def charts(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r'<svg class="chart".*?</svg>', html)]


def test_charts_have_their_numbers_in_words() -> None:
    found = charts(whole())
    assert len(found) == 10  # two for each of four T of verify, and for decode
    for svg in found:
        title, desc = svg.find("title"), svg.find("desc")
        assert svg.get("role") == "img" and svg.get("viewBox")
        assert title is not None and desc is not None and title.text and desc.text
        assert svg.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
        assert not re.search(r"href|url\(|style=", ElementTree.tostring(svg, "unicode"))
    said = next(svg.findtext("desc") for svg in found if "ratio-verify-snapshots-12" in svg.get("aria-labelledby", ""))
    assert said is not None
    assert f"({TRITON}): 0.88 at N = 1, 1.12 at N = 8, 1.16 at N = 64, 1.17 at N = 256." in said
    assert f"({SEED}): 1.00 at N = 1" in said and "flashinfer" not in said
    shares = next(
        svg.findtext("desc") for svg in found if "share-verify-snapshots-12" in svg.get("aria-labelledby", "")
    )
    assert shares is not None and f"K ({OURS}): 90 % at N = 1" in shares


def test_each_series_is_told_apart_without_colour() -> None:
    looks = styles(list(bench(*grid()).rows) + list(bench(*(row(f"p-{i}/x") for i in range(30))).rows))
    assert len({look.letter for look in looks.values()}) == len(looks)
    peers = [look for look in looks.values() if not look.ours]
    assert len({(look.dash, look.marker) for look in peers}) == len(peers)
    svg = next(svg for svg in charts(whole()) if "share" in svg.get("aria-labelledby", ""))
    letters = [text.text for text in svg.iter("text") if text.get("class") == "letter"]
    assert letters == sorted(letters, key=lambda letter: "KDC".index(letter or ""))  # from the best down


def test_places_in_a_chart() -> None:
    assert positions([1]) == {1: 187.0}
    xs = list(positions([1, 2, 4, 256]).values())
    assert xs == sorted(xs) and xs[2] - xs[1] == pytest.approx(xs[1] - xs[0], abs=0.2)
    for wanted in ([10.0] * 8, [HEIGHT - 30.0] * 8, [5.0, 90.0, 91.0, 200.0]):
        placed = spread_labels(wanted)
        assert all(b - a >= LABEL_GAP - 0.2 for a, b in itertools.pairwise(placed))
        assert placed[0] > 0 and placed[-1] < HEIGHT
    for values in ([1.1, 1.2], [0.3, 4.0], [0.02, 90.0]):
        axis = ratio_axis(values)
        assert all(0 < axis.height(value) < 1 for value in [1.0, *values])
        assert 1.0 in [tick for tick, _ in axis.ticks] and len(axis.ticks) >= 3


def test_more_tokens_and_other_slices() -> None:
    html = whole()
    assert "<summary>T = 8</summary>" in html and "T = 12: rows for N = 1, 8, 64, 256" in html
    html = bench_report(site(row(pool="fp32"), row(TRITON, pool="fp32")))
    assert "Nothing was run with 16/32 heads" in html and '<svg class="chart"' not in html


def test_local_run() -> None:
    recorded, local = (
        bench(row(OURS, 10.0), row(OURS, 3.0, N=1)),
        bench(row(OURS, 8.0), recorded=False, date="2026-03-01"),
    )
    both = bench_report(Site(GATES, (), None, (recorded, local)))
    (found,) = rows_of(both[both.index("## This machine") : both.index("All 1 rows")], OURS)
    assert "<td>8.00</td><td>10.0</td><td>1.25×</td>" in found
    alone = bench_report(Site(GATES, (), None, (local,)))
    assert ">not recorded<" in alone and "last run of this checkout" in alone and "## Launches" in alone
    same = bench(row(OURS, 10.0), recorded=False)
    assert "It is the recorded run" in bench_report(Site(GATES, (), None, (bench(row(OURS, 10.0)), same)))


def test_html_is_escaped() -> None:
    attack = "<script>alert(1)</script>"
    run = bench(
        row(note=attack, errors={attack: 1.0}),
        row(TRITON, None, note=f"wrong: {attack}"),
        device=attack,
        commit=attack,
        versions={attack: attack},
        sources={attack: attack},
        ceilings={"snapshots-12": {"value": 4000, "unit": "GB/s", "how": attack}},
        starts=[{"impl": OURS, "what": "eager-call", "value": 1.0, "unit": "us", "note": attack}],
    )
    html = bench_report(Site(GATES, (), None, (run,)))
    assert "<script" not in html and "&lt;script&gt;" in html


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", PAGE)
def test_series_are_readable_in_both_schemes(scheme: str) -> None:
    prefix = r'\[data-md-color-scheme="slate"\] ' if scheme == "slate" else "^"
    colours = re.findall(rf"{prefix}\.(?:ours|s\d) {{\s*--series: (#\w{{6}});\s*}}", CSS.read_text(), re.MULTILINE)
    assert len(colours) == 9
    for colour in colours:
        lighter, darker = sorted((luminance(colour), luminance(PAGE[scheme])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, colour


def test_shape_text() -> None:
    assert Shape("decode", 8, 1, cold=False).text == "decode, N = 8, T = 1, 16/32 heads, bf16, warm"
