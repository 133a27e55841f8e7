"""The divergence of verify from decode over many tokens (results/drift.json) as a chart and a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs._render.html import esc
from specs._render.reading import SiteError, parse_date, read_json, take
from specs._render.svg import LEFT, RIGHT, WIDTH, Axis, Series, Style, curves, framed, grid, levels, sides

Curves = Mapping[str, tuple[float, ...]]
#: engine -> how it looks, what it is
Engines = Mapping[str, tuple[Style, str]]

ENGINES: Engines = {
    "lossless": (Style("L", 0, True), "lossless: rounded after every token"),
    "chunk": (Style("C", 0, False), "the default mode: fp32 through a block"),
    "stock": (Style("S", 1, False), "stock engines: fp32 through a block, and beta rounded in decode only"),
}
TICKS = 5  # of an axis, at most, besides zero
MARKS = 6  # on a curve, about


@dataclass(frozen=True)
class Drift:
    """Relative L2 distance of the stored states, after every block of a verify, for each of ENGINES."""

    block: int
    date: str
    torch: str
    curves: Curves

    @property
    def tokens(self) -> list[int]:
        return [self.block * (i + 1) for i in range(len(self.curves["lossless"]))]


def read_curves(data: Any, key: str, engines: Engines, where: str) -> Curves:
    """Engine -> its distances. Raises SiteError naming the file for anything but lists of them, all of one length."""
    listed = take(data, key, dict, where)
    found = {}
    for name in engines:
        values = take(listed, name, list, f"{where} {key}")
        if not values or not all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in values):
            raise SiteError(f"{where}: {key}: {name!r} must be a list of finite distances, got {values!r}")
        found[name] = tuple(values)
    if len({len(values) for values in found.values()}) != 1 or set(listed) != set(engines):
        raise SiteError(f"{where}: expected the {key} {', '.join(engines)}, all of one length")
    return found


def load_drift(path: Path) -> Drift:
    """Raises SiteError naming the file for anything that is missing, not a number, or not one value per block."""
    data, where = read_json(path), str(path)
    found = read_curves(data, "curves", ENGINES, where)
    block, date = take(data, "block", int, where), take(data, "date", str, where)
    if block < 1:
        raise SiteError(f"{where}: 'block' must be at least 1, got {block}")
    parse_date(date, where)
    return Drift(block, date, take(data, "torch", str, where), found)


def share(value: float) -> str:
    """A distance in words; only an exact zero is called zero."""
    return f"{100 * value:.2f} %" if value else "exactly 0"


def round_step(high: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that divides 0 .. high into at most TICKS whole steps."""
    size = 10.0 ** math.floor(math.log10(high / TICKS))
    return next(size * factor for factor in (1, 2, 5, 10) if high / (size * factor) < TICKS + 1)


def vertical(found: Curves, zero: str) -> Axis:
    """From zero, with round ticks; `zero` says what has no distance."""
    high = 1.15 * max(max(curve) for curve in found.values()) or 1.0
    step = round_step(high)
    ticks = tuple((i * step, f"{100 * i * step:.3g} %") for i in range(int(high / step) + 1))
    return Axis(0.0, high, ticks, 0.0, zero, "", False)


def drawn(name: str, title: str, desc: str, engines: Engines, found: Curves, tokens: list[int], zero: str) -> str:
    """The curves over the number of tokens, and their legend. `name` makes the chart's ids unique on the page."""
    axis = vertical(found, zero)
    inner = WIDTH - LEFT - RIGHT
    x_of = {t: round(LEFT + inner * t / tokens[-1], 1) for t in tokens}
    step = max(1, round(round_step(tokens[-1])))
    ticks = {t: round(LEFT + inner * t / tokens[-1], 1) for t in range(0, tokens[-1] + 1, step)}
    series = [Series(look, tuple(zip(tokens, found[engine], strict=True))) for engine, (look, _) in engines.items()]
    y_of, every = levels(axis), max(1, len(tokens) // MARKS)
    parts = [*grid(axis, ticks, y_of, "tokens"), *curves(series, axis, x_of, every), *sides(axis, y_of)]
    items = "".join(
        f'<li class="{look.css}">{look.swatch()}<b class="letter">{esc(look.letter)}</b> {esc(text)}</li>'
        for look, text in engines.values()
    )
    return f'<div class="charts">{framed(name, title, desc, parts)}</div><ul class="legend">{items}</ul>'


def said(drift: Drift) -> str:
    """The last value of each curve."""
    ends = ", ".join(f"{look.letter} {share(drift.curves[name][-1])}" for name, (look, _) in ENGINES.items())
    return f"After {drift.tokens[-1]} tokens in blocks of {drift.block}: {ends}."


def drift_report(path: Path) -> str:
    """Chart, legend and one line that says what was recorded when."""
    drift = load_drift(path)
    title = "Distance of the stored state from decode's"
    desc = f"Relative L2 distance over {drift.tokens[-1]} tokens. {said(drift)}"
    return (
        f"{drawn('drift', title, desc, ENGINES, drift.curves, drift.tokens, 'decode, bit for bit')}\n\n"
        f"{esc(said(drift))} Computed by the references on {esc(drift.date[:10])} (torch {esc(drift.torch)}).\n"
    )
