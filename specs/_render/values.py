"""Values of records inside prose, so that no number a record holds is typed by hand.

    {{ gate3.sm90 3.1 "o rel L2" }}        the value with its unit
    {{ gate3.sm90 3.1 "o rel L2" limit }}  the limit it was held to
    {{ gate3.sm90 3.1 verdict }}           the verdict, as a badge
    {{ gate3.sm90 date }}                  device, date or commit of the run
    {{ bench ... }}                        a value of the benchmark (bench_values.py)

Code spans and fenced blocks are left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from specs._render.bench_values import bench_value
from specs._render.freshness import freshness, outcome
from specs._render.html import badge, esc, missing, number
from specs._render.reading import SiteError
from specs._render.records import Evidence, Record, Site

CODE = r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[^\S\n]*$|(?P<tick>`+)(?!`).*?(?<!`)(?P=tick)(?!`)"
TOKEN = re.compile(rf"{CODE}|\{{\{{(?P<value>.*?)\}}\}}|<!-- (?P<marker>[\w-]+) -->", re.DOTALL | re.MULTILINE)


def expand(text: str, value: Callable[[str], str], marker: Callable[[str], str | None]) -> str:
    """Replace each value and marker outside code. `marker` returns None for a comment that is not ours."""

    def replace(match: re.Match[str]) -> str:
        if match["value"] is not None:
            return value(match["value"])
        if match["marker"] is not None:
            found = marker(match["marker"])
            return match[0] if found is None else found
        return match[0]

    return TOKEN.sub(replace, text)


def inline_value(site: Site, expression: str) -> str:
    """HTML of one `{{ ... }}`; a stale or failed value says so. Raises SiteError for a wrong name."""
    try:
        where, *rest = shlex.split(expression)
    except ValueError as error:
        raise SiteError(f"cannot read {{{{{expression}}}}}: {error}") from error
    if where == "bench":
        return bench_value(site, rest)
    head = re.fullmatch(r"gate(\d+)\.(cpu|sm90)", where)
    if head is None or not 1 <= len(rest) <= 3:
        raise SiteError(f'cannot read {{{{{expression}}}}}: expected {{{{ gate<N>.<cpu|sm90> <criterion> "<name>" }}}}')
    gate = site.gate(int(head[1]))
    record = site.find(gate.number, head[2], recorded=True)
    if len(rest) == 1:
        if rest[0] not in ("device", "date", "commit"):
            raise SiteError(f"{{{{{expression}}}}}: a run has a device, a date and a commit, not {rest[0]!r}")
        return esc(getattr(record, rest[0])) if record else missing(where)
    if gate.page is not None and rest[0] not in gate.criteria:
        raise SiteError(f"{{{{{expression}}}}}: {gate.page} has no criterion {rest[0]}")
    return criterion_value(site, record, rest, f"{where} {rest[0]}")


def criterion_value(site: Site, record: Record | None, rest: list[str], where: str) -> str:
    """`rest` is [criterion, name] or [criterion, name, "limit"]."""
    shown = outcome(site, record, rest[0])
    if rest[1] == "verdict":
        return badge(shown.status)
    if shown.result is None or shown.status == "not-run":
        return missing(where)
    named = {item.name: item for item in shown.result.evidence}
    if rest[1] not in named:
        raise SiteError(f"{where}: no evidence {rest[1]!r}; the record has {', '.join(map(repr, named)) or 'none'}")
    assert record is not None
    mark = "" if shown.status == "pass" else " " + badge(shown.status)
    if not mark and freshness(site, record) == "unknown":
        mark = ' <small class="missing">freshness unknown</small>'
    text = value_text(named[rest[1]], limit=rest[2:] == ["limit"])
    return f'<span class="value" title="{esc(where)}, {esc(record.name)}">{text}</span>{mark}'


def value_text(item: Evidence, *, limit: bool) -> str:
    unit = f" {esc(item.unit)}" if item.unit else ""
    return f"{esc(number(item.limit if limit else item.value))}{unit}"
