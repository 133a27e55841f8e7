"""The README's block of speeds, from the committed records: `python -m specs._render.readme` writes it.

Only files of the repository decide what it says, so that it is the same on every machine: a run that another committed
record supersedes is stale, and then the block has no number.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specs._render.bench import Bench, Shape
from specs._render.freshness import freshness
from specs._render.html import micros, percent, times
from specs._render.reading import SiteError
from specs._render.records import Site, load_site

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
OP, TOKENS, REQUESTS = "verify-snapshots", (4, 12, 16), (1, 8, 64, 256)
NOT_RECORDED = "No speed is recorded, so none is claimed: `nox -s bench -- --record` on an SM90 machine does that."
STALE = (
    "The recorded speeds are STALE: the kernels have changed since, so no number is shown here. "
    "`nox -s bench -- --record` on an SM90 machine measures them again."
)


def line(bench: Bench, shape: Shape) -> str:
    row, peer = bench.fastest(shape), bench.best_peer(shape)
    cells = ["not recorded", "", "", ""]
    if row is not None:
        cells = [f"{micros(row.time)} µs", "" if row.share is None else percent(row.share), "", ""]
        if peer is not None:
            cells[2:] = [times(peer.time / row.time), f"`{peer.impl}`"]
    return f"| {shape.T} | {shape.N} | {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def block(site: Site) -> str:
    """What belongs between the markers, as Markdown."""
    bench = site.bench
    if bench is None:
        return NOT_RECORDED
    if freshness(site, bench) == "stale":
        return STALE
    table = "\n".join(line(bench, Shape(OP, n, t)) for t in TOKENS for n in REQUESTS)
    commit = bench.commit.removesuffix("-dirty")[:10] + " with uncommitted changes" * bench.commit.endswith("-dirty")
    return (
        f"Verify with a state kept after every token: {bench.device}, {bench.when:%Y-%m-%d}, commit {commit}.\n"
        "16/32 heads, bf16 pool, states outside the L2 cache, CUDA-graph replay. *Of ceiling* compares with the bare\n"
        "memory traffic; *ratio* is the time of the fastest peer over the fastest of ours, options such as\n"
        "`head_batch=2` included: above 1 is faster.\n\n"
        "| T | N | one launch | of ceiling | ratio | fastest peer |\n|---|---|---|---|---|---|\n" + table
    )


def replaced(text: str, content: str) -> str:
    """`text` with `content` between the markers. Raises SiteError unless both are there, once and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or text.count(BEGIN) + text.count(END) != 2:
        raise SiteError(f"README.md: needs {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def committed_site(root: Path) -> Site:
    """The site of the repository's own records: no local run, no list of this checkout's sources."""
    return load_site(root / "specs", None)


def main() -> None:
    path = ROOT / "README.md"
    try:
        path.write_text(replaced(path.read_text(encoding="utf-8"), block(committed_site(ROOT))), encoding="utf-8")
    except SiteError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
