"""The divergence of verify from decode over many tokens (results/drift.json) as a chart and a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from specs._render.html import esc
from specs._render.reading import SiteError, parse_date, read_json, take
from specs._render.svg import LEFT, RIGHT, WIDTH, Axis, Series, Style, curves, framed, grid, levels, sides

#: engine -> how it looks, what it is
ENGINES = {
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
    curves: dict[str, tuple[float, ...]]

    @property
    def tokens(self) -> list[int]:
        return [self.block * (i + 1) for i in range(len(self.curves["lossless"]))]


def load_drift(path: Path) -> Drift:
    """Raises SiteError naming the file for anything that is missing, not a number, or not one value per block."""
    data, where = read_json(path), str(path)
    listed = take(data, "curves", dict, where)
    found = {}
    for name in ENGINES:
        values = take(listed, name, list, f"{where} curves")
        if not values or not all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in values):
            raise SiteError(f"{where}: curve {name!r} must be a list of finite distances, got {values!r}")
        found[name] = tuple(values)
    if len({len(values) for values in found.values()}) != 1 or set(listed) != set(ENGINES):
        raise SiteError(f"{where}: expected the curves {', '.join(ENGINES)}, all of one length")
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


def vertical(drift: Drift) -> Axis:
    """From zero, with round ticks."""
    high = 1.15 * max(max(curve) for curve in drift.curves.values()) or 1.0
    step = round_step(high)
    ticks = tuple((i * step, f"{100 * i * step:.3g} %") for i in range(int(high / step) + 1))
    return Axis(0.0, high, ticks, 0.0, "decode, bit for bit", "", False)


def drift_chart(drift: Drift) -> str:
    """The curves over the number of tokens."""
    tokens, axis = drift.tokens, vertical(drift)
    inner = WIDTH - LEFT - RIGHT
    x_of = {t: round(LEFT + inner * t / tokens[-1], 1) for t in tokens}
    step = max(1, round(round_step(tokens[-1])))
    ticks = {t: round(LEFT + inner * t / tokens[-1], 1) for t in range(0, tokens[-1] + 1, step)}
    series = [Series(look, tuple(zip(tokens, drift.curves[name], strict=True))) for name, (look, _) in ENGINES.items()]
    y_of, every = levels(axis), max(1, len(tokens) // MARKS)
    parts = [*grid(axis, ticks, y_of, "tokens"), *curves(series, axis, x_of, every), *sides(axis, y_of)]
    title = "Distance of the stored state from decode's"
    desc = f"Relative L2 distance over {tokens[-1]} tokens. {said(drift)}"
    return framed("drift", title, desc, parts)


def said(drift: Drift) -> str:
    """The last value of each curve."""
    ends = ", ".join(f"{look.letter} {share(drift.curves[name][-1])}" for name, (look, _) in ENGINES.items())
    return f"After {drift.tokens[-1]} tokens in blocks of {drift.block}: {ends}."


def drift_report(path: Path) -> str:
    """Chart, legend and one line that says what was recorded when."""
    drift = load_drift(path)
    items = "".join(
        f'<li class="{look.css}">{look.swatch()}<b class="letter">{esc(look.letter)}</b> {esc(text)}</li>'
        for look, text in ENGINES.values()
    )
    return (
        f'<div class="charts">{drift_chart(drift)}</div><ul class="legend">{items}</ul>\n\n'
        f"{esc(said(drift))} Computed by the references on {esc(drift.date[:10])} (torch {esc(drift.torch)}).\n"
    )
