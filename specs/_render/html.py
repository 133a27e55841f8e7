"""HTML pieces: escaping, numbers, badges, tables. A badge has its meaning in words, not only in colour."""

from __future__ import annotations

import html
import math
import re
from typing import Any

BADGES = {
    "pass": "pass",
    "fail": "FAIL",
    "not-run": "not run here",
    "stale": "STALE",
    "missing": "no record",
    "partial": "partly",
    "planned": "planned",
    "unknown": "freshness unknown",
}


def esc(text: object) -> str:
    return html.escape(str(text), quote=True)


def prose(text: str) -> str:
    """Escaped text in which `code` between backticks is code."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(f"<code>{esc(part)}</code>" if i % 2 else esc(part) for i, part in enumerate(parts))


def badge(status: str, text: str | None = None, title: str = "") -> str:
    """One verdict badge: `status` chooses its colour; it says `text`, by default the status in words."""
    hint = f' title="{esc(title)}"' if title else ""
    return f'<span class="badge badge-{esc(status)}"{hint}>{esc(text or BADGES[status])}</span>'


def missing(what: str) -> str:
    return f'<span class="missing" title="{esc(what)}">not recorded</span>'


def number(value: Any) -> str:
    """A value as text: three significant digits for a float, scientific where zeros would hide it."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-2 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def micros(us: float) -> str:
    """Microseconds to three digits, or to the whole one; without the unit."""
    return f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}"


def table(head: list[str], rows: list[list[str]], kind: str) -> str:
    """A table that scrolls inside its own box, and whose rows become blocks on a phone (site.css).

    `head` is text, `rows` hold HTML. The explicit roles keep it a table for a screen reader when CSS makes
    blocks of it.
    """
    cells = "".join(f'<th role="columnheader" scope="col">{esc(name)}</th>' for name in head)
    body = []
    for row in rows:
        columns = "".join(
            f'<td role="cell" data-label="{esc(name)}"><div>{cell}</div></td>'
            for name, cell in zip(head, row, strict=True)
        )
        body.append(f'<tr role="row">{columns}</tr>')
    return (
        f'<div class="scroll"><table role="table" class="outcomes {kind}">'
        f'<thead role="rowgroup"><tr role="row">{cells}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(body)}</tbody></table></div>'
    )
