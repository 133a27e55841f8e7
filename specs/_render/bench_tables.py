"""The tables of the benchmark: rows, ceilings, lost shapes, costs outside the launch."""

from __future__ import annotations

from fnmatch import fnmatchcase

from specs._render.bench import ABSENCES, OPS, Bench, Contest, Row, Shape, Start
from specs._render.html import badge, esc, micros, number, percent, prose, table, times

#: what a row that was not timed is called, and its badge
ABSENT_BADGES = {"not here": "missing", "wrong": "fail", "not supported": "planned", "failed": "fail"}
STARTS_TEXT = {
    "eager-call": "host time of one eager call",
    "first-call": "first call, with empty caches",
    "cached-start": "first call of a new process, with a warm disk cache",
    "peak-memory": "peak memory",
}
UNITS = {"us": "µs"}
#: (implementations, cost outside the launch) -> what was asked for: at most so much
AIMS = {("kernels/decode*", "eager-call"): 8.0}
LOSSES_SHOWN = 12


def compact(head: list[str], rows: list[tuple[str, list[str]]], label: str, filters: str = "") -> str:
    """A dense table that scrolls in its own box. `rows` are (class, cells as HTML).

    `filters` names the columns that bench.js makes selects of.
    """
    cells = "".join(f'<th scope="col">{esc(name)}</th>' for name in head)
    body = "".join(
        f"<tr{f' class={kind}' if kind else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for kind, row in rows
    )
    wanted = f' data-filters="{esc(filters)}"' if filters else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(label)}">'
        f'<table class="bench"{wanted}><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def ratio_of(bench: Bench, row: Row) -> str:
    """Of ours: the best peer's time over this one. Of a peer: its time over the fastest of ours."""
    if row.us is None:
        return ""
    if row.ours:
        peer = bench.best_peer(row.shape)
        return times(peer.time / row.us) if peer else ""
    ours = bench.fastest(row.shape)
    return times(row.us / ours.time) if ours else ""


def time_and_note(row: Row) -> tuple[str, str]:
    """The cells of the time and of the note; instead of a time, a badge says why there is none."""
    if row.us is not None:
        return micros(row.us), prose(row.note)
    word = next((word for word in ABSENCES if row.note.startswith(f"{word}: ")), None)
    if word is None:
        return badge("missing", "not timed"), prose(row.note)
    text = word.upper() if ABSENT_BADGES[word] == "fail" else word
    return badge(ABSENT_BADGES[word], text), prose(row.note.removeprefix(f"{word}: "))


def measured(bench: Bench, row: Row) -> list[str]:
    """The cells from the time on."""
    error = row.errors.get("o")
    time, note = time_and_note(row)
    return [
        time,
        "" if row.gbps is None else f"{row.gbps:.0f}",
        "" if row.share is None else percent(row.share),
        ratio_of(bench, row),
        "" if error is None else number(error),
        note,
    ]


MEASURED_HEAD = ["µs", "GB/s", "of ceiling", "ratio", "error of o", "note"]


def by_time(row: Row) -> tuple[int, Shape, bool, float, str]:
    """Ops in their own order, then shapes, then the fastest first; what was not timed comes last."""
    return list(OPS).index(row.shape.op), row.shape, row.us is None, row.us or 0.0, row.impl


def shape_table(bench: Bench, rows: list[Row], label: str) -> str:
    """Rows that differ in N and implementation only."""
    found = [
        ("ours" if row.ours else "", [str(row.shape.N), f"<code>{esc(row.impl)}</code>", *measured(bench, row)])
        for row in sorted(rows, key=by_time)
    ]
    return compact(["N", "implementation", *MEASURED_HEAD], found, label)


def full_table(bench: Bench, label: str) -> str:
    """Every row of the record, with the columns that bench.js filters by."""
    found = []
    for row in sorted(bench.rows, key=by_time):
        shape = row.shape
        cells = [shape.op, str(shape.N), str(shape.T), f"{shape.H}/{shape.HV}", shape.pool]
        cells += ["cold" if shape.cold else "warm", f"<code>{esc(row.impl)}</code>"]
        found.append(("ours" if row.ours else "", cells + measured(bench, row)))
    names = ["op", "N", "T", "heads", "pool", "states", "implementation"]
    return compact([*names, *MEASURED_HEAD], found, label, ",".join(names))


def ceilings_table(bench: Bench) -> str:
    rows = [
        ("", [f"<code>{esc(name)}</code>", f"{number(item.value)} {UNITS.get(item.unit, item.unit)}", prose(item.how)])
        for name, item in bench.ceilings.items()
    ]
    return compact(["ceiling", "measured", "how"], rows, "Ceilings") if rows else "<p>No ceiling is recorded.</p>"


def loss_row(contest: Contest) -> tuple[str, list[str]]:
    ours, peer = contest.ours, contest.peer
    cells = [times(contest.ratio), esc(ours.shape.text)]
    return "", [*cells, *(f"<code>{esc(row.impl)}</code> {micros(row.time)} µs" for row in (ours, peer))]


def losses(bench: Bench) -> str:
    """Every shape on which the best peer is faster than the fastest of ours, the worst first."""
    contests = bench.contests()
    lost = sorted((contest for contest in contests if contest.ratio < 1), key=lambda contest: contest.ratio)
    alone = len(bench.by_shape) - len(contests)
    rest = f" {alone} more were not timed on both sides." if alone else ""
    if not contests:
        return f"<p>No shape was timed on both sides, so nothing is compared.{rest}</p>"
    if not lost:
        everywhere = f"on all {len(contests)} shapes compared, the fastest of ours is not slower than the best peer"
        return f"<p>Nowhere: {everywhere}.{rest}</p>"
    head = ["ratio", "shape", "fastest of ours", "best peer"]
    intro = f"<p>On {len(lost)} of {len(contests)} shapes compared.{rest}</p>"
    first = compact(head, [loss_row(contest) for contest in lost[:LOSSES_SHOWN]], "Shapes where a peer is faster")
    if len(lost) <= LOSSES_SHOWN:
        return intro + first
    more = compact(head, [loss_row(c) for c in lost[LOSSES_SHOWN:]], "More shapes where a peer is faster")
    return f'{intro}{first}<details class="evidence"><summary>{len(lost) - LOSSES_SHOWN} more</summary>{more}</details>'


def aim_text(item: Start) -> str:
    """What a cost should be at most, and whether it is; "" where nothing is asked."""
    aims = [aim for (impl, what), aim in AIMS.items() if what == item.what and fnmatchcase(item.impl, impl)]
    if not aims:
        return ""
    text = f"at most {min(aims):g} {UNITS.get(item.unit, item.unit)}"
    if item.value is None:
        return text
    met = item.value <= min(aims)
    return f"{text} {badge('pass' if met else 'fail', 'met' if met else 'NOT MET')}"


def starts_table(bench: Bench) -> str:
    rows = []
    for item in bench.starts:
        value = '<span class="missing">not measured</span>'
        if item.value is not None:
            value = f"{number(item.value)} {UNITS.get(item.unit, item.unit)}"
        name = f"<code>{esc(item.impl)}</code>"
        rows.append([name, STARTS_TEXT[item.what], value, aim_text(item), prose(item.note)])
    return table(["Implementation", "Cost", "Measured", "Asked", "Note"], rows, "starts")
