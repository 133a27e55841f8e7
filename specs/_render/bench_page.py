"""What replaces the bench marker: the recorded run with charts and tables, and the last run of this checkout."""

from __future__ import annotations

from specs._render.bench import OPS, Bench, Row, Shape
from specs._render.bench_charts import legend, ratio_chart, share_chart, styles
from specs._render.bench_tables import ceilings_table, compact, full_table, losses, shape_table, starts_table
from specs._render.freshness import freshness
from specs._render.html import badge, esc, micros, times
from specs._render.outcomes import FRESHNESS_TEXT, commit_text, date_text, sources_details
from specs._render.records import Site

#: what the charts and first tables are about; the whole grid is in the table at the end
CHARTED_HEADS = (16, 32)
CHARTED_POOL = {"decode-dense": "fp32"}  # of any other op: bf16
QUICK_N = (1, 8, 64, 256)
QUICK_T = {"verify-snapshots": (4, 12, 16), "verify-replay": (4, 12, 16)}
OPEN_T = 12

NOTHING = """<p class="tally">{badge} No benchmark run is recorded, so these pages claim no speed. On an SM90 machine,
<code>nox -s bench -- --record</code> makes the record.</p>"""
STALE = "A generated source has changed since: these numbers say nothing about this commit, and decide nothing."


def sentence(site: Site, bench: Bench) -> str:
    """Who measured, when, on which commit and versions; a stale run says so first."""
    versions = ", ".join(f"{esc(name)} {esc(version)}" for name, version in bench.versions.items())
    fresh = freshness(site, bench)
    mark = f"<p>{badge('stale')} {STALE}</p>" if fresh == "stale" else ""
    raw = ' <a href="results/bench.sm90.json" download>The record as JSON</a>.' if bench.recorded else ""
    return (
        f"{mark}<p>Measured on {esc(bench.device)}, {esc(date_text(bench))}, commit {commit_text(bench.commit)}, "
        f"with {versions or 'no versions recorded'}. Freshness: {esc(FRESHNESS_TEXT[fresh])}.{raw}</p>"
    )


def charted_pool(op: str) -> str:
    return CHARTED_POOL.get(op, "bf16")


def charted(bench: Bench, op: str) -> list[Row]:
    """Rows of the head shape, pool and state traffic that the charts show."""

    def shown(shape: Shape) -> bool:
        looks = (shape.op, shape.H, shape.HV, shape.pool, shape.cold)
        return looks == (op, *CHARTED_HEADS, charted_pool(op), True)

    return [row for row in bench.rows if shown(row.shape)]


def preferred(found: set[int], wanted: tuple[int, ...]) -> set[int]:
    """The wanted ones of those found, or all if there is none."""
    return found & set(wanted) or found


def tokens_block(bench: Bench, op: str, tokens: int, rows: list[Row], *, is_open: bool) -> str:
    """Charts and the quick table of one T."""
    looks = styles(charted(bench, op))
    shapes = sorted({row.shape for row in rows})
    charts = ratio_chart(bench, shapes, looks) + share_chart(bench, shapes, looks)
    figure = f'<div class="charts" data-search-exclude>{charts}</div>' if charts else ""
    few = preferred({row.shape.N for row in rows}, QUICK_N)
    quick = [row for row in rows if row.shape.N in few]
    body = shape_table(bench, quick, f"{op}, T = {tokens}")
    summary = f"T = {tokens}: rows for N = {', '.join(map(str, sorted(few)))}"
    opened = " open" if is_open else ""
    return f'{figure}<details class="evidence"{opened}><summary>{summary}</summary>{body}</details>'


def op_section(bench: Bench, op: str) -> list[str]:
    """One op: charts and quick tables; Markdown headings between HTML."""
    total = sum(row.shape.op == op for row in bench.rows)
    more = f'<a class="all-rows" href="#all-rows" data-op="{esc(op)}">All {total} rows of {esc(op)}</a>.'
    rows = charted(bench, op)
    intro = f"<p>{esc(OPS[op][0].upper() + OPS[op][1:])}."
    if not rows:
        return [f"### {op}", f"{intro} Nothing was run with 16/32 heads and cold {charted_pool(op)} states. {more}</p>"]
    by_tokens: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.shape.T):
        by_tokens.setdefault(row.shape.T, []).append(row)
    first = preferred(set(by_tokens), QUICK_T.get(op, tuple(by_tokens)))
    opened = OPEN_T if OPEN_T in first else min(first)
    parts = [f"### {op}", f"{intro} Charts and tables: 16/32 heads, cold {charted_pool(op)} states. {more}</p>"]
    parts.append(legend(rows))
    parts += [tokens_block(bench, op, t, by_tokens[t], is_open=t == opened) for t in sorted(first)]
    rest = [tokens_block(bench, op, t, found, is_open=True) for t, found in by_tokens.items() if t not in first]
    if rest:
        names = ", ".join(str(t) for t in by_tokens if t not in first)
        parts.append(f'<details class="evidence"><summary>T = {names}</summary>{"".join(rest)}</details>')
    return parts


def all_rows(bench: Bench) -> str:
    return (
        f'<details class="evidence" data-search-exclude><summary>All {len(bench.rows)} rows</summary>'
        f"{full_table(bench, f'All rows, {bench.name}')}</details>"
    )


def jumps(bench: Bench, ops: list[str]) -> str:
    """Links to the sections, in place of the table of contents beside the page: the tables need its room."""
    names = ["Where we lose", "Ceilings", *ops, "All rows", *["Outside the launch"] * bool(bench.starts)]
    links = (f'<a href="#{esc(name.lower().replace(" ", "-"))}">{esc(name)}</a>' for name in names)
    return f"<nav aria-label='Sections'>{' · '.join(links)}</nav>"


def report(site: Site, bench: Bench) -> list[str]:
    """A whole run."""
    ops = [op for op in OPS if any(row.shape.op == op for row in bench.rows)]
    parts = [sentence(site, bench), sources_details(site, [(bench.name, bench)]), jumps(bench, ops)]
    parts += ["## Where we lose", losses(bench), "## Ceilings", ceilings_table(bench), "## Launches"]
    for op in ops:
        parts += op_section(bench, op)
    parts += ["## All rows", all_rows(bench)]
    if bench.starts:
        parts += ["## Outside the launch", starts_table(bench)]
    return parts


def here(site: Site, recorded: Bench, local: Bench) -> list[str]:
    """The last run of this checkout beside the record: ours on the shapes that both timed."""
    parts = ["## This machine", sentence(site, local)]
    if (local.when, local.commit) == (recorded.when, recorded.commit):
        return [*parts, "<p>It is the recorded run.</p>"]
    rows = []
    for shape in sorted(local.by_shape):
        mine, theirs = local.fastest(shape), recorded.fastest(shape)
        if mine and theirs:
            cells = [esc(shape.text), f"<code>{esc(mine.impl)}</code>", micros(mine.time), micros(theirs.time)]
            rows.append(("", [*cells, times(theirs.time / mine.time)]))
    head = ["shape", "fastest of ours", "µs here", "µs recorded", "recorded over here"]
    both = compact(head, rows, "Ours on this machine") if rows else "<p>It shares no timed shape with the record.</p>"
    return [*parts, both, all_rows(local)]


def bench_report(site: Site) -> str:
    """What replaces the bench marker."""
    recorded, local = site.bench, site.local_bench
    if recorded is None and local is None:
        return NOTHING.format(badge=badge("missing"))
    if recorded is None:
        assert local is not None
        head = f"<p>{badge('missing', 'not recorded')} What follows is the last run of this checkout.</p>"
        return "\n\n".join([head, *(part for part in report(site, local) if part)])
    parts = report(site, recorded) + (here(site, recorded, local) if local else [])
    return "\n\n".join(part for part in parts if part)
