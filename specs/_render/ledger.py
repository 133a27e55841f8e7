"""The claims ledger: what was claimed, and what the records of this repository say about it.

A verdict is never typed: an entry names what decides, criteria of a gate (`if_pass` says what their passing means) or
rows of the benchmark (bench_claims.py), and the verdict follows from the records. What nothing decides is "not yet
measured".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs._render.bench_claims import SpeedDecision, parse_speed_decision, speed_verdict
from specs._render.freshness import outcome
from specs._render.html import badge, esc, prose, table
from specs._render.reading import SiteError, read_yaml, take
from specs._render.records import Site
from specs._render.values import expand, inline_value

DECIDED = ("confirmed", "refuted", "superseded")
OPEN = "not yet measured"
BADGE_OF = {
    "confirmed": "pass",
    "refuted": "refuted",
    "superseded": "superseded",
    OPEN: "missing",
    "undecided": "fail",
}


@dataclass(frozen=True)
class Decision:
    """The criteria of one gate that decide a claim together, and the verdict if all of them pass."""

    criteria: tuple[str, ...]
    if_pass: str

    @property
    def name(self) -> str:
        return ("criterion " if len(self.criteria) == 1 else "criteria ") + " and ".join(self.criteria)


@dataclass(frozen=True)
class Claim:
    """One row of the ledger."""

    claim: str
    number: str  # as its author gave it
    source: str
    gate: int  # that decides or will decide
    reason: str
    decided_by: Decision | SpeedDecision | None


def parse_claim(data: Any, where: str) -> Claim:
    """Raises SiteError for a verdict typed by hand or a decision that cannot be made."""
    claim, number, source, reason = (take(data, key, str, where) for key in ("claim", "number", "source", "reason"))
    where = f"{where} ({claim[:40]})"
    if "verdict" in data:
        raise SiteError(f"{where}: a verdict is computed, not typed; name the criterion in 'decided_by'")
    decision: Decision | SpeedDecision | None = None
    if "decided_by" in data and "faster" in take(data, "decided_by", dict, where):
        decision = parse_speed_decision(data["decided_by"], where)
    elif "decided_by" in data:
        criteria, if_pass = (
            take(data["decided_by"], "criteria", list, where),
            take(data["decided_by"], "if_pass", str, where),
        )
        if if_pass not in DECIDED:
            raise SiteError(f"{where}: 'if_pass' must be one of {', '.join(DECIDED)}, got {if_pass!r}")
        if not criteria or any(str(name).split(".")[0] != str(data.get("gate")) for name in criteria):
            raise SiteError(f"{where}: 'criteria' must be some of gate {data.get('gate')}, got {criteria!r}")
        decision = Decision(tuple(map(str, criteria)), if_pass)
    return Claim(claim, number, source, take(data, "gate", int, where), reason, decision)


def load_ledger(path: Path) -> dict[str, list[Claim]]:
    """Section title -> claims."""
    sections = read_yaml(path)
    if not isinstance(sections, dict):
        raise SiteError(f"{path}: expected sections, each with a list of claims")
    return {
        title: [parse_claim(item, f"{path} {title} #{i}") for i, item in enumerate(claims, 1)]
        for title, claims in sections.items()
    }


def verdict(site: Site, claim: Claim) -> tuple[str, str]:
    """(verdict, which records gave it). Each criterion has to pass somewhere, and none may fail anywhere."""
    if claim.decided_by is None:
        return OPEN, ""
    if isinstance(claim.decided_by, SpeedDecision):
        return speed_verdict(site, claim.decided_by, OPEN)
    gate = site.gate(claim.gate)
    seen: dict[str, dict[str, list[str]]] = {}  # criterion -> status -> records
    for criterion in claim.decided_by.criteria:
        if gate.page is not None and criterion not in gate.criteria:
            raise SiteError(f"ledger: {gate.page} has no criterion {criterion} ({claim.claim[:40]})")
        found = seen.setdefault(criterion, {})
        for record in site.records:
            if record.gate == gate.number:
                found.setdefault(outcome(site, record, criterion).status, []).append(record.name)
    for status, said, verb in (("fail", "undecided", "fails"), ("pass", claim.decided_by.if_pass, "passes")):
        having = [criterion for criterion in seen if status in seen[criterion]]
        if having and (status == "fail" or len(having) == len(seen)):
            return said, "; ".join(f"criterion {name} {verb} ({'; '.join(seen[name][status])})" for name in having)
    states = sorted({f"{status} ({'; '.join(names)})" for found in seen.values() for status, names in found.items()})
    return OPEN, f"{claim.decided_by.name}: {'; '.join(states) or 'no record'}"


def decider(site: Site, claim: Claim, why: str) -> str:
    """Who decides the claim, with a link, and what was found."""
    if isinstance(claim.decided_by, SpeedDecision):
        return f'<a href="bench.html">Benchmark</a>: {esc(why)}.'
    gate = site.gate(claim.gate)
    anchor = f"#criterion-{claim.decided_by.criteria[0]}" if claim.decided_by else ""
    name = f"Gate {gate.number}"
    page = (
        f'<a href="{esc(gate.page.removesuffix(".md"))}.html{esc(anchor)}">{name}</a>'
        if gate.page
        else f"{name} (planned)"
    )
    return page + (f": {esc(why)}." if why else " decides." if gate.page is None else ", by no criterion so far.")


def claim_row(site: Site, claim: Claim) -> tuple[str, list[str]]:
    said, why = verdict(site, claim)
    reason = expand(prose(claim.reason), lambda value: inline_value(site, value.replace("&quot;", '"')), lambda _: None)
    basis = f"{reason}<br><small>{decider(site, claim, why)}</small>"
    source = f"<small>{prose(claim.source)}</small>"
    stated = f"<strong>{prose(claim.claim)}</strong><br>{prose(claim.number)}<br>{source}"
    return said, [stated, badge(BADGE_OF[said], said), basis]


def ledger(site: Site, sections: dict[str, list[Claim]]) -> str:
    """What replaces the ledger marker: the count of each verdict, then one table per section."""
    counts: dict[str, int] = {}
    parts = []
    for title, claims in sections.items():
        rows = []
        for claim in claims:
            said, row = claim_row(site, claim)
            counts[said] = counts.get(said, 0) + 1
            rows.append(row)
        parts += [f"## {title}", table(["Claim and its number", "Verdict here", "Basis"], rows, "ledger")]
    tally = " ".join(badge(BADGE_OF[said], f"{count} {said}") for said, count in sorted(counts.items()))
    return "\n\n".join([f'<p class="tally">{tally}</p>', *parts])
