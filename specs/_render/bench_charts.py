"""The charts of the benchmark: times of the peers over ours, and shares of the ceiling, over N for one T."""

from __future__ import annotations

import math
from collections.abc import Callable

from specs._render.bench import Bench, Row, Shape
from specs._render.html import esc, percent
from specs._render.svg import Axis, Series, Style, chart

#: candidates for the ticks of a ratio, on an axis that spans less than the factor
RATIO_TICKS = {
    2.5: (0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5),
    12.0: (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 7.0, 10.0),
    math.inf: (0.01, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0),
}
PEER_LETTERS = "ABCDEFGHIJLMNOPQRSTUVWXYZ"  # K is ours
SHARE_TICKS = ((0.0, "0 %"), (0.25, "25 %"), (0.5, "50 %"), (0.75, "75 %"))


def styles(rows: list[Row]) -> dict[str, Style]:
    """A look for each implementation: K, K2, ... for ours, A, B, ... for peers."""
    ours = sorted({row.impl for row in rows if row.ours})
    peers = sorted({row.impl for row in rows if not row.ours})
    found = {impl: Style(f"K{i + 1}" if i else "K", i, True) for i, impl in enumerate(ours)}
    for i, impl in enumerate(peers):
        again, letter = divmod(i, len(PEER_LETTERS))
        found[impl] = Style(PEER_LETTERS[letter] + str(again + 1) * (again > 0), i, False)
    return found


def legend(rows: list[Row]) -> str:
    """What the letters mean; an implementation that no row has a time of says so."""
    timed = {row.impl for row in rows if row.us is not None}
    items = "".join(
        f'<li class="{look.css}">{look.swatch()}<b class="letter">{esc(look.letter)}</b> <code>{esc(impl)}</code>'
        f"{'' if impl in timed else ' no time'}</li>"
        for impl, look in styles(rows).items()
    )
    return f'<ul class="legend">{items}</ul>'


Points = dict[str, list[tuple[int, float]]]  # implementation -> (N, value), N ascending


def drawn(points: Points, looks: dict[str, Style], text: Callable[[float], str]) -> tuple[list[Series], str]:
    """The series in the order of the legend, and all their numbers in words."""
    impls = [impl for impl in looks if impl in points]
    said = (
        f"{looks[impl].letter} ({impl}): {', '.join(f'{text(value)} at N = {n}' for n, value in points[impl])}."
        for impl in impls
    )
    return [Series(looks[impl], tuple(points[impl])) for impl in impls], " ".join(said)


def ratio_axis(values: list[float]) -> Axis:
    """Logarithmic, around 1 and all values."""
    low, high = min([0.95, *values]) / 1.1, max([1.1, *values]) * 1.1
    candidates = next(ticks for factor, ticks in RATIO_TICKS.items() if high / low < factor)
    shown = [tick for tick in candidates if low <= tick <= high]
    return Axis(low, high, tuple((tick, f"{tick:g}×") for tick in shown), 1.0, "ours faster", "peer faster", True)


def ratio_chart(bench: Bench, shapes: list[Shape], looks: dict[str, Style]) -> str:
    """Each peer's time over the fastest of ours; "" if nothing can be compared. The shapes differ in N only."""
    points: Points = {}
    for shape in shapes:
        ours = bench.fastest(shape)
        for row in bench.timed(shape):
            if ours and not row.ours:
                points.setdefault(row.impl, []).append((shape.N, row.time / ours.time))
    series, said = drawn(points, looks, lambda value: f"{value:.2f}")
    if not series:
        return ""
    axis = ratio_axis([value for item in series for _, value in item.points])
    op, tokens = shapes[0].op, shapes[0].T
    desc = f"{op} with T = {tokens}: how many times as long each peer takes as the fastest of ours. {said}"
    title = f"T = {tokens}: time of each peer over ours"
    return chart(f"ratio-{op}-{tokens}", title, desc, series, axis, [shape.N for shape in shapes])


def share_chart(bench: Bench, shapes: list[Shape], looks: dict[str, Style]) -> str:
    """What each implementation reaches of the memory ceiling; "" if no ceiling applies. The shapes differ in N only."""
    points: Points = {}
    for shape in shapes:
        for row in bench.timed(shape):
            if row.share is not None:
                points.setdefault(row.impl, []).append((shape.N, row.share))
    series, said = drawn(points, looks, percent)
    if not series:
        return ""
    op, tokens = shapes[0].op, shapes[0].T
    axis = Axis(0.0, 1.12, (*SHARE_TICKS, (1.0, "100 %")), 1.0, "what the memory allows", "", False)
    desc = f"{op} with T = {tokens}: share of the memory ceiling that applies. {said}"
    title = f"T = {tokens}: share of the memory ceiling"
    return chart(f"share-{op}-{tokens}", title, desc, series, axis, [shape.N for shape in shapes])
