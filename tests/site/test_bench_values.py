"""Speeds in prose and in the README come from the record, and are the same on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs._render.bench import Bench
from specs._render.reading import SiteError
from specs._render.readme import BEGIN, END, NOT_RECORDED, STALE, block, committed_site, replaced
from specs._render.records import Site
from specs._render.values import inline_value
from tests.site import bench_samples
from tests.site.bench_samples import LABEL, OURS, SEED, TRITON, data, grid, row, site, write
from tests.site.samples import GATES
from tests.site.samples import record as gate_record
from tests.site.test_records import make_specs

ROOT = Path(__file__).resolve().parents[2]
ROWS = [row(OURS, 10.0), row("kernels/slow", 11.0), row(TRITON, 12.5, share=0.4), row(SEED, 30.0)]
AT = "bench verify-snapshots N=64 T=12"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (f"{AT} us", ">10.0 µs<"),
        (f"{AT} gbps", ">2000 GB/s<"),
        (f"{AT} share", ">50 %<"),
        (f"{AT} ratio", ">1.25×<"),
        (f"{AT} peer", f">{TRITON}<"),
        (f'{AT} share impl="sglang-*"', ">40 %<"),
        (f'{AT} ratio than="flashqla-*/gated"', ">3.00×<"),
        (f"{AT} ratio impl=kernels/slow than=flashqla-*", ">2.73×<"),
        ("bench verify-snapshots T=12 N=64 H=16 HV=32 pool=bf16 cold=true us", ">10.0 µs<"),
        (f"{AT} cold=false us", "not recorded"),
        (f"{AT} pool=fp32 us", "not recorded"),
        (f"{AT} impl=nobody us", "not recorded"),
        (f"{AT} ratio than=nobody", "not recorded"),
        ("bench decode N=1 T=1 ratio", "not recorded"),
        ("bench device", "NVIDIA H200"),
        ("bench date", "2026-01-02T03:04:05+00:00"),
        ("bench commit", "0123456789abcdef"),
    ],
)
def test_value(expression: str, text: str) -> None:
    html = inline_value(site(*ROWS), expression)
    assert text in html and "STALE" not in html
    assert "not recorded" in inline_value(Site(GATES, (), None), expression)


@pytest.mark.parametrize(
    "expression",
    ["bench", "bench colour", "bench decode us", "bench decode N=1 us", "bench decode N=0 T=1 us",
     "bench verify N=1 T=1 us", "bench decode N=1 T=1", "bench decode N=1 T=1 speed", "bench decode N=1 T=1 us gbps",
     "bench decode N=1 N=2 T=1 us", "bench decode N=1 T=1 K=64 us", "bench decode N=1 T=1 pool=fp8 us",
     "bench decode N=1 T=1 cold=yes us", "bench decode N=1 T=1 impl= us", "bench decode N=1 T=1 us than=x",
     'bench decode N=1 T=1 impl="x us'],
)  # fmt: skip
def test_value_that_names_nothing(expression: str) -> None:
    for each in (site(*ROWS), Site(GATES, (), None)):
        with pytest.raises(SiteError):
            inline_value(each, expression)


def test_a_stale_or_unchecked_value_says_so() -> None:
    stale = inline_value(site(*ROWS, sources=bench_samples.STALE), f"{AT} us")
    assert "10.0 µs" in stale and "STALE" in stale
    assert "freshness unknown" in inline_value(site(*ROWS, sources=None), f"{AT} us")


def test_readme_block() -> None:
    text = block(site(*grid(), sources=None))
    assert "NVIDIA H200, 2026-01-02, commit 0123456789" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 13
    assert f"| 12 | 1 | 4.00 µs | 90 % | 0.88× | `{TRITON}` |" in lines
    assert f"| 16 | 256 | 769 µs | 90 % | 1.17× | `{TRITON}` |" in lines


def test_readme_block_without_some_rows() -> None:
    text = block(site(row(OURS, 10.0), row(OURS, 3.0, N=8) | {"share": None}, sources=None, commit="abc-dirty"))
    assert "| 12 | 64 | 10.0 µs | 50 % | | |" in text and "| 12 | 8 | 3.00 µs | | | |" in text
    assert "| 4 | 1 | not recorded | | | |" in text and "commit abc with uncommitted changes" in text


def superseded(date: str) -> Site:
    gate = gate_record("sm90", sources={LABEL: "cccc"}, date=date)
    return site(*grid(), sources=None, records=(gate,))


def test_readme_block_without_a_fresh_record() -> None:
    assert block(Site(GATES, (), None)) == NOT_RECORDED
    assert block(superseded("2026-06-01")) == STALE
    assert "µs" in block(superseded("2025-06-01"))
    assert not any("µs" in text or "×" in text for text in (NOT_RECORDED, STALE))


def test_only_committed_files_decide_the_readme(tmp_path: Path) -> None:
    specs = make_specs(tmp_path)
    write(tmp_path / ".gates", data(row()))
    assert committed_site(tmp_path).benches == ()
    write(specs / "results", data(row()))
    (tmp_path / ".gates" / "sources.json").write_text('{"x": "y"}')
    found = committed_site(tmp_path)
    assert isinstance(found.bench, Bench) and found.local_bench is None and found.sources is None


def test_block_is_replaced() -> None:
    text = f"a\n{BEGIN}\nold\n{END}\nb\n"
    assert replaced(text, "one\ntwo") == f"a\n{BEGIN}\none\ntwo\n{END}\nb\n"
    assert replaced(replaced(text, "x"), "x") == replaced(text, "x")


@pytest.mark.parametrize("text", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN, BEGIN + BEGIN + END])
def test_a_readme_without_its_markers(text: str) -> None:
    with pytest.raises(SiteError, match=r"README\.md"):
        replaced(text, "x")


def test_the_readme_says_what_the_records_say() -> None:
    """If this fails: `python -m specs._render.readme`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == replaced(text, block(committed_site(ROOT)))
