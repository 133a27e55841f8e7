"""The site builds strictly, loads nothing from outside, and shows what the records say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.site import bench_samples
from tests.site.samples import data, evidence, result

ROOT = Path(__file__).resolve().parents[2]
LOADING = {"src", "srcset", "href", "action", "poster", "data", "content"}
GATE = """---
title: "Gate 0"
gate: 0
session: gate0
criteria:
  "0.1": compiles
  "0.2": runs
---

# Gate 0

Value: {{ gate0.cpu 0.1 "o rel L2" }}

## Outcomes

<!-- outcomes -->
"""


class Links(HTMLParser):
    """Collects what a page would load or link to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in LOADING]


def build(root: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
    ]  # --quiet would drop the warnings that strict counts
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def outside_urls(site: Path) -> list[str]:
    """Every absolute or protocol-relative address that a page or a style sheet refers to."""
    found = []
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        links = Links()
        if path.suffix == ".html":
            links.feed(text)
        links.found += re.findall(r"url\(\s*[\"']?([^)\"']+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
        found += [f"{path.name}: {link}" for link in links.found if re.match(r"\s*(https?:)?//", link)]
        if path.suffix == ".html":
            namespaces_gone = text.replace("http://www.w3.org/2000/svg", "")
            found += [f"{path.name}: {url}" for url in re.findall(r"https?://[^\s\"'<]+", namespaces_gone)]
    return found


def copy_site(root: Path) -> None:
    """This repository's own site, to be built elsewhere."""
    shutil.copy(ROOT / "mkdocs.yml", root)
    shutil.copytree(ROOT / "specs", root / "specs", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository's own site, built from a copy."""
    root = tmp_path_factory.mktemp("published")
    copy_site(root)
    done = build(root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / ".site"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A site of one gate under this repository's hook and configuration."""
    config = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("\nnav:")])
    specs = tmp_path / "specs"
    shutil.copytree(ROOT / "specs" / "_render", specs / "_render", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("hooks.py", "gates.yml", "assets"):
        copy = shutil.copytree if (ROOT / "specs" / name).is_dir() else shutil.copy
        copy(ROOT / "specs" / name, specs / name)
    for folder in (specs / "gates", specs / "results"):
        folder.mkdir()
    (specs / "gates" / "gate0.md").write_text(GATE)
    (specs / "index.md").write_text("# Start\n\n<!-- gates -->\n")
    return tmp_path


def write_record(root: Path, content: dict[str, object], folder: str = "specs/results") -> None:
    (root / folder).mkdir(exist_ok=True)
    (root / folder / f"gate0.{content['machine']}.json").write_text(json.dumps(content))


def test_nothing_is_loaded_from_outside(published: Path) -> None:
    assert outside_urls(published) == []
    # the theme's script would fetch these two when a page has them
    for page in published.rglob("*.html"):
        assert not re.search(r'class="[^"]*mermaid|data-md-component="source"', page.read_text()), page


def test_the_outside_url_check_can_fail(tmp_path: Path) -> None:
    pages = {"a.html": '<link href="//cdn/x.css">', "b.html": "see https://x.org", "c.css": "a{b:url(http://x)}"}
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    assert {line.split(":")[0] for line in outside_urls(tmp_path)} == set(pages)


def test_what_is_published(published: Path) -> None:
    files = {path.relative_to(published).as_posix() for path in published.rglob("*") if path.is_file()}
    assert {"index.html", "ledger.html", "bench.html", "design/house.html"} <= files
    assert {"assets/site.css", "assets/bench.js"} <= files
    assert not [name for name in files if name.endswith((".py", ".yml", ".pyc"))]
    for page in ("index.html", "ledger.html", "bench.html", "gates/gate0.html"):
        text = (published / page).read_text()
        assert not re.search(r"<!-- (gates|outcomes|ledger|bench) -->", text), page
        assert "badge" in text, page


def test_records_reach_the_pages(small: Path) -> None:
    write_record(small, data())
    write_record(small, data("sm90", sources={"probes.x(N=8)": "bbbb"}, date="2025-12-01"))
    write_record(small, data(criteria={"0.1": result("not-run"), "0.2": result()}), ".gates")
    (small / ".gates" / "sources.json").write_text('{"probes.x(N=8)": "aaaa"}')
    done = build(small)
    assert done.returncode == 0, done.stdout + done.stderr
    start, gate = ((small / ".site" / name).read_text() for name in ("index.html", "gates/gate0.html"))
    for text in (">pass 2 of 2<", ">STALE 2 of 2<", ">1 of 2 pass<", "cpu, 1 not run here<", ">planned<"):
        assert text in start
    for text in (">1.70e-3</span>", ">STALE<", ">not run here<", "this machine, CPU", "../results/gate0.sm90.json"):
        assert text in gate
    assert (small / ".site" / "results" / "gate0.sm90.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "gate0.cpu.json"),
        (json.dumps(data(criteria={"0.1": result("pass", 1, evidence(value=1.0))})), "says pass, but"),
        (json.dumps(data(criteria={"0.1": result(), "0.2": result()})), "no evidence 'o rel L2'"),
    ],
)
def test_a_bad_record_stops_the_build(small: Path, text: str, said: str) -> None:
    (small / "specs" / "results" / "gate0.cpu.json").write_text(text)
    done = build(small)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_missing_page_stops_the_build(small: Path) -> None:
    (small / "specs" / "index.md").write_text("[gone](gone.md)\n")
    assert build(small).returncode != 0


@pytest.mark.parametrize("recorded", [False, True])
def test_the_site_builds_with_and_without_a_benchmark(tmp_path: Path, recorded: bool) -> None:
    copy_site(tmp_path)
    results = tmp_path / "specs" / "results"
    (results / "bench.sm90.json").unlink(missing_ok=True)
    if recorded:
        bench_samples.write(results, bench_samples.data(*bench_samples.grid(), starts=bench_samples.starts()))
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    speed, start, claims = ((tmp_path / ".site" / f"{name}.html").read_text() for name in ("bench", "index", "ledger"))
    assert outside_urls(tmp_path / ".site") == []
    assert ("No benchmark run is recorded" in speed) != recorded
    assert ('<svg class="chart"' in speed) == ("data-filters=" in speed) == recorded
    assert ("0.88×" in start) == recorded and (start.count("not recorded") == 9) != recorded
    assert ("asked: at least 2.7×" in claims) == recorded
    if recorded:
        assert re.search(r'<script src="assets/bench\.js"', speed)


def test_a_bad_benchmark_record_stops_the_build(small: Path) -> None:
    bench_samples.write(small / "specs" / "results", bench_samples.data(bench_samples.row(checked=False)))
    done = build(small)
    assert done.returncode != 0
    assert "bench.sm90.json row 1" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_ring_drift_marker_draws_its_record(small: Path) -> None:
    recorded = small / "specs" / "results" / "ring-drift.json"
    shutil.copy(ROOT / "specs" / "results" / "ring-drift.json", recorded)
    (small / "specs" / "index.md").write_text("# Start\n\n<!-- ring-drift -->\n")
    done = build(small)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (small / ".site" / "index.html").read_text()
    assert 'aria-labelledby="ring-drift-title ring-drift-desc"' in page and "<!-- ring-drift -->" not in page
    recorded.write_text("{}")
    done = build(small)
    assert done.returncode != 0
    assert "index.md" in done.stdout + done.stderr and "ring-drift.json" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
