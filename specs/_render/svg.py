"""Line charts as inline SVG: colours from the page, and every series also told apart by dashes, marker and a letter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specs._render.html import esc

WIDTH, HEIGHT = 360, 232
LEFT, RIGHT, TOP, BOTTOM = 44, 30, 30, 36
LABEL_GAP = 11  # between the letters at the ends of lines
STYLES = 8  # colours in site.css; dashes and markers repeat with other periods
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4")
#: a marker around (0, 0)
MARKERS = (
    "M-3.2-3.2H3.2V3.2H-3.2Z",
    "M0-4 4 3H-4Z",
    "M0-4.4 4.4 0 0 4.4-4.4 0Z",
    "M0 4 4-3H-4Z",
    "M-4 0H4M0-4V4",
    "M-3.2-3.2 3.2 3.2M-3.2 3.2 3.2-3.2",
    "M-2-3.6H2L4 0 2 3.6H-2L-4 0Z",
)
ROUND = "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1-4 0Z"


@dataclass(frozen=True)
class Style:
    """How a series looks in every chart of a section."""

    letter: str
    index: int  # among the peers, or among ours
    ours: bool

    @property
    def css(self) -> str:
        return "ours" if self.ours else f"s{self.index % STYLES}"

    @property
    def dash(self) -> str:
        pattern = DASHES[self.index % len(DASHES)]
        return f' stroke-dasharray="{pattern}"' if pattern else ""

    @property
    def marker(self) -> str:
        return ROUND if self.ours else MARKERS[self.index % len(MARKERS)]

    def swatch(self) -> str:
        """The line and marker of this series, for a legend that says its name beside it."""
        return (
            f'<svg class="swatch {self.css}" viewBox="0 0 36 12" aria-hidden="true"><path class="line" d="M0 6H36"'
            f'{self.dash}/><path class="mark" d="{self.marker}" transform="translate(18 6)"/></svg>'
        )


@dataclass(frozen=True)
class Series:
    style: Style
    points: tuple[tuple[int, float], ...]  # (N, value), N ascending


@dataclass(frozen=True)
class Axis:
    """The vertical axis: its range, its ticks, and the line that the eye compares with."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    line: float
    above: str  # said above the line
    below: str  # said below it, "" for nothing
    log: bool

    def height(self, value: float) -> float:
        """Of `value`, as a fraction of the plot: 0 at the bottom."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)


def positions(xs: list[int]) -> dict[int, float]:
    """N -> x. Logarithmic; a single N is in the middle."""
    low, span = math.log(xs[0]), math.log(xs[-1] / xs[0])
    inner = WIDTH - LEFT - RIGHT
    return {x: round(LEFT + inner * ((math.log(x) - low) / span if span else 0.5), 1) for x in xs}


def spread_labels(wanted: list[float]) -> list[float]:
    """Ascending heights moved apart by at least LABEL_GAP, within the plot where they fit."""
    placed: list[float] = []
    for y in wanted:
        placed.append(max(y, placed[-1] + LABEL_GAP) if placed else y)
    limit = float(HEIGHT - BOTTOM + 4)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - LABEL_GAP
    return [round(y, 1) for y in placed]


def grid(axis: Axis, x_of: dict[int, float], y_of: dict[float, float], label: str = "N requests") -> list[str]:
    """Ticks, grid lines, and the line compared with; `label` says what the numbers below are."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<path class="grid" d="M{LEFT} {y_of[value]}H{right}"/>' for value, _ in axis.ticks]
    parts += [
        f'<text class="tick" x="{LEFT - 5}" y="{y_of[value] + 3.5}" text-anchor="end">{esc(text)}</text>'
        for value, text in axis.ticks
    ]
    free = -math.inf
    for n, x in x_of.items():
        parts.append(f'<path class="grid" d="M{x} {bottom}v4"/>')
        if x - free >= 16:
            parts.append(f'<text class="tick" x="{x}" y="{bottom + 15}" text-anchor="middle">{n}</text>')
            free = x
    parts.append(
        f'<text class="tick" x="{(LEFT + right) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{esc(label)}</text>'
    )
    line = y_of[axis.line]
    parts.append(f'<path class="level" d="M{LEFT} {line}H{right}"/>')
    return parts


def sides(axis: Axis, y_of: dict[float, float]) -> list[str]:
    """The words above and below the line."""
    heights = ((axis.above, y_of[axis.line] - 5), (axis.below, y_of[axis.line] + 12))
    return [f'<text class="side" x="{LEFT + 6}" y="{y:.1f}">{esc(text)}</text>' for text, y in heights if text]


def curves(series: list[Series], axis: Axis, x_of: dict[int, float], every: int = 1) -> list[str]:
    """Lines, a marker on `every` n-th point, and at each line's end its letter; what comes first is drawn on top."""

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * axis.height(value), 1)

    parts, ends = [], []
    for item in reversed(series):
        places = [(x_of[n], y(value)) for n, value in item.points]
        path = "M" + "L".join(f"{x} {at}" for x, at in places)
        marks = "".join(
            f'<path class="mark" d="{item.style.marker}" transform="translate({x} {at})"/>'
            for x, at in places[every - 1 :: every]
        )
        parts.append(f'<g class="{item.style.css}"><path class="line" d="{path}"{item.style.dash}/>{marks}</g>')
        ends.append((*places[-1][::-1], item.style))
    ends.sort(key=lambda end: end[0])
    for (at, x, style), label in zip(ends, spread_labels([end[0] for end in ends]), strict=True):
        parts.append(
            f'<g class="{style.css}"><path class="lead" d="M{x + 5} {at}L{x + 11} {label}"/>'
            f'<text class="letter" x="{x + 12}" y="{label + 4}">{esc(style.letter)}</text></g>'
        )
    return parts


def levels(axis: Axis) -> dict[float, float]:
    """Value -> y of every tick and of the line compared with."""
    inner = HEIGHT - TOP - BOTTOM
    values = (axis.line, *(tick for tick, _ in axis.ticks))
    return {value: round(HEIGHT - BOTTOM - inner * axis.height(value), 1) for value in values}


def chart(name: str, title: str, desc: str, series: list[Series], axis: Axis, xs: list[int]) -> str:
    """One chart over N. `name` makes its ids unique on the page, `desc` says all its numbers in words."""
    x_of, y_of = positions(xs), levels(axis)
    return framed(name, title, desc, [*grid(axis, x_of, y_of), *curves(series, axis, x_of), *sides(axis, y_of)])


def framed(name: str, title: str, desc: str, parts: list[str]) -> str:
    """The picture around the parts of a chart."""
    body = "".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{esc(title)}</title><desc id="{name}-desc">{esc(desc)}</desc>'
        f'<text class="name" x="4" y="15">{esc(title)}</text>{body}</svg>'
    )
