"""Is what was measured still what this checkout generates? A stale outcome is never shown as passed."""

from __future__ import annotations

from dataclasses import dataclass

from specs._render.reading import Run
from specs._render.records import Record, Result, Site

#: state of one generated source -> what a reader is told
LABEL_STATES = {
    "current": "what this checkout generates",
    "agrees": "same in every other record",
    "differs": "this checkout generates another text",
    "gone": "this checkout does not generate it",
    "superseded": "another text in a record that is not older",
    "unknown": "nothing to compare with",
}
STALE_STATES = frozenset({"differs", "gone", "superseded"})


@dataclass(frozen=True)
class Outcome:
    """One criterion in one record, as shown: `status` is pass, fail, not-run, stale or missing."""

    status: str
    result: Result | None


def label_state(site: Site, record: Run, label: str) -> str:
    """Compare one source of `record` with what this checkout generates and with every other record.

    The checkout's own list (`sources.json`) speaks first; but a record that is not older and names another
    text makes this one stale even without it, since both cannot be what the checkout generates.
    """
    sha = record.sources[label]
    if site.sources is not None and label not in site.sources:
        return "gone"
    if site.sources is not None and site.sources[label] != sha:
        return "differs"
    others = [r for r in site.runs if r is not record and label in r.sources]
    if any(r.sources[label] != sha and r.when >= record.when for r in others):
        return "superseded"
    if site.sources is not None:
        return "current"
    return "agrees" if any(r.sources[label] == sha for r in others) else "unknown"


def freshness(site: Site, record: Run) -> str:
    """The worst of the sources: `stale`, `unknown` (not checkable), `current`; `none` without sources."""
    states = {label_state(site, record, label) for label in record.sources}
    if not states:
        return "none"
    if states & STALE_STATES:
        return "stale"
    return "unknown" if "unknown" in states else "current"


def outcome(site: Site, record: Record | None, criterion: str) -> Outcome:
    """The outcome of one criterion as it may be shown."""
    result = record.criteria.get(criterion) if record else None
    if record is None or result is None:
        return Outcome("missing", None)
    if result.verdict != "not-run" and freshness(site, record) == "stale":
        return Outcome("stale", result)
    return Outcome(result.verdict, result)


def summary(site: Site, record: Record | None, gate: int) -> tuple[str, str, str]:
    """(status, badge text, remark) of a gate in one record: its worst criterion decides; only all passing is a pass."""
    if record is None:
        return "missing", "no record", ""
    found = [outcome(site, record, criterion).status for criterion in site.gate(gate).criteria]
    passed, total = found.count("pass"), len(found)
    for status, text in (("fail", "FAIL"), ("stale", "STALE")):
        if status in found:
            return status, f"{text} {found.count(status)} of {total}", ""
    rest = ", ".join(
        f"{found.count(status)} {text}"
        for status, text in (("not-run", "not run here"), ("missing", "without record"))
        if status in found
    )
    if not passed:
        return ("not-run", "not run here", "") if "not-run" in found else ("missing", "no record", rest)
    return ("partial", f"{passed} of {total} pass", rest) if rest else ("pass", f"pass {passed} of {total}", "")
