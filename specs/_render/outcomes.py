"""The outcome tables of a gate page and the overview of all gates, as HTML."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from specs._render.freshness import (
    LABEL_STATES,
    STALE_STATES,
    Outcome,
    freshness,
    label_state,
    outcome,
    summary,
)
from specs._render.html import badge, esc, number, prose, table
from specs._render.reading import Run, SiteError
from specs._render.records import MACHINES, Evidence, Gate, Record, Site

FRESHNESS_TEXT = {
    "none": "involves no generated source",
    "current": "every generated source checked",
    "stale": "a generated source changed",
    "unknown": "nothing to compare the generated sources with",
}
MISSING_RUNS = {"cpu": "CPU, recorded", "sm90": "GPU, recorded"}


def runs(site: Site, gate: int) -> list[tuple[str, Record | None]]:
    """The columns of a gate: both recorded machines always, then what ran in this checkout."""
    columns: list[tuple[str, Record | None]] = [
        (MISSING_RUNS[machine], site.find(gate, machine, recorded=True)) for machine in MACHINES
    ]
    local = [site.find(gate, machine, recorded=False) for machine in MACHINES]
    found: list[tuple[str, Record | None]] = [(record.name, record) for record in local if record]
    return columns + (found or [("this machine", None)])


def outcome_badge(shown: Outcome) -> str:
    """The badge of one criterion on one machine, with its number of tests."""
    if shown.status == "stale" and shown.result and shown.result.verdict == "fail":
        return badge("stale", "STALE (failed)", "a generated source changed since; the outcome had been a failure")
    if shown.status == "stale":
        return badge(
            "stale",
            title="a generated source changed since this was measured: it says nothing about this commit",
        )
    tests = shown.result.tests if shown.result else 0
    return badge(shown.status) + (f" <small>{tests} test{'s' * (tests != 1)}</small>" if tests else "")


def criteria_table(site: Site, gate: Gate) -> str:
    columns = runs(site, gate.number)
    rows = []
    for criterion, text in gate.criteria.items():
        name = f'<strong id="criterion-{esc(criterion)}">{esc(criterion)}</strong> {prose(text)}'
        rows.append([name, *(outcome_badge(outcome(site, record, criterion)) for _, record in columns)])
    return table(["Criterion", *(name for name, _ in columns)], rows, "criteria")


def evidence_row(run: str, item: Evidence) -> list[str]:
    unit = f" {esc(item.unit)}" if item.unit else ""
    limit = f"{esc(item.relation)} {esc(number(item.limit))}{unit}" if item.relation else "note only"
    return [esc(item.name), esc(run), f"{esc(number(item.value))}{unit}", limit, str(item.cases)]


def evidence_details(site: Site, gate: Gate) -> str:
    """One closed block per criterion with everything its tests measured; of several cases, the worst."""
    blocks = []
    for criterion in gate.criteria:
        rows, badges = [], []
        for name, record in runs(site, gate.number):
            shown = outcome(site, record, criterion)
            if shown.result is None:
                continue
            badges.append(f"{esc(name)} {badge(shown.status)}")
            mark = " (STALE)" if shown.status == "stale" else ""
            rows += [evidence_row(name + mark, item) for item in shown.result.evidence]
        rows.sort(key=lambda row: row[0])
        head = ["Measured", "Where", "Worst value", "Required", "Cases"]
        body = table(head, rows, "evidence") if rows else "<p>No value recorded: the verdict is that of its tests.</p>"
        if badges:
            summary_line = f"<summary>{esc(criterion)} <small>{' · '.join(badges)}</small></summary>"
            blocks.append(f'<details class="evidence">{summary_line}{body}</details>')
    return "".join(blocks) or "<p>No record, so no evidence.</p>"


def date_text(record: Run) -> str:
    return f"{record.when.astimezone(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"


def commit_text(commit: str) -> str:
    """Short hash; a run with uncommitted changes says so."""
    short = f"<code>{esc(commit.removesuffix('-dirty')[:10])}</code>"
    return f"{short} with uncommitted changes" if commit.endswith("-dirty") else short


def runs_table(site: Site, gate: Gate, up: str) -> str:
    """Who measured: device, date, commit, versions, freshness, and the raw record to download."""
    rows = []
    for name, record in runs(site, gate.number):
        if record is None:
            continue
        versions = ", ".join(f"{esc(key)} {esc(value)}" for key, value in record.versions.items())
        raw = (
            f'<a href="{up}results/gate{gate.number}.{record.machine}.json" download>JSON</a>'
            if record.recorded
            else "local"
        )
        fresh = freshness(site, record)
        mark = f"{badge(fresh)} " if fresh in ("stale", "unknown") else ""
        says = mark + esc(FRESHNESS_TEXT[fresh])
        rows.append(
            [esc(name), esc(record.device), esc(date_text(record)), commit_text(record.commit), versions, says, raw]
        )
    head = ["Run", "Device", "Date", "Commit", "Versions", "Freshness", "Record"]
    return table(head, rows, "runs") if rows else ""


def sources_table(site: Site, named: Sequence[tuple[str, Run | None]]) -> tuple[str, int, int]:
    """(HTML, number of sources, number of stale ones) of the runs, with what each source's comparison says."""
    rows, stale = [], 0
    for name, record in named:
        for label, sha in record.sources.items() if record else ():
            assert record is not None
            state = label_state(site, record, label)
            stale += state in STALE_STATES
            text = (
                badge("stale", f"STALE: {LABEL_STATES[state]}") if state in STALE_STATES else esc(LABEL_STATES[state])
            )
            rows.append([f"<code>{esc(label)}</code>", esc(name), f"<code>{esc(sha[:16])}</code>", text])
    rows.sort(key=lambda row: row[0])
    against = "" if site.sources is not None else " This checkout's own list of sources was not made before this page."
    body = table(["Program", "Run", "sha256", "Freshness"], rows, "sources")
    return f"<p>sha256 of the generated CUDA.{against}</p>{body}", len(rows), stale


def sources_details(site: Site, named: Sequence[tuple[str, Run | None]]) -> str:
    """A closed block with every generated source; "" if there is none."""
    body, total, stale = sources_table(site, named)
    count = f"{total} generated sources" + (f", {stale} stale" if stale else "")
    return f'<details class="evidence"><summary>{count}</summary>{body}</details>' if total else ""


def gate_outcomes(site: Site, number: int, up: str) -> str:
    """What replaces the outcomes marker on a gate's page. `up` leads from there to the root of the site."""
    gate = site.gate(number)
    if not gate.criteria:
        raise SiteError(f"gate {number} has no criteria to show outcomes of")
    recorded = [record for _, record in runs(site, number) if record]
    strays = sorted({c for record in recorded for c in record.criteria if c not in gate.criteria})
    note = f"<p>{badge('unknown', 'unlisted')} A record also names {esc(', '.join(strays))}.</p>" if strays else ""
    return "\n\n".join(
        part
        for part in (
            criteria_table(site, gate) + note,
            "### Evidence",
            evidence_details(site, gate),
            "### Runs",
            runs_table(site, gate, up) or "<p>No run of this gate is recorded.</p>",
            sources_details(site, runs(site, number)),
        )
        if part
    )


def overview(site: Site) -> str:
    """What replaces the gates marker on the start page: every gate, live or planned, a badge per machine."""
    rows = []
    for gate in site.gates:
        title = f"Gate {gate.number}"
        if gate.page is None:
            rows.append([f"{esc(title)}<br>{badge('planned')}", esc(gate.proves), "", "", ""])
            continue
        cells: dict[str, str] = {}  # column -> badges; runs of both kinds in this checkout share one cell
        for name, record in runs(site, gate.number):
            status, text, remark = summary(site, record, gate.number)
            unchecked = record is not None and status == "pass" and freshness(site, record) == "unknown"
            local = record is not None and not record.recorded
            remarks = [record.machine] if record and local else []
            remarks += [remark] * bool(remark) + ["freshness unknown"] * unchecked
            cell = badge(status, text) + (f"<br><small>{esc(', '.join(remarks))}</small>" if remarks else "")
            column = "this machine" if local else name
            cells[column] = f"{cells[column]}<br>{cell}" if column in cells else cell
        link = f'<a href="{esc(gate.page.removesuffix(".md"))}.html">{esc(title)}</a>'
        session = f"<br><small><code>nox -s {esc(gate.session)}</code></small>"
        rows.append([link + session, esc(gate.proves), *cells.values()])
    return table(["Gate", "Proves", *MISSING_RUNS.values(), "this machine"], rows, "gates")
