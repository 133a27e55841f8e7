"""The error of states over many tokens (results/ring-drift.json) as a chart and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specs._render.drift import Curves, Engines, drawn, read_curves, share
from specs._render.html import esc
from specs._render.reading import SiteError, parse_date, read_json, take
from specs._render.svg import Style

ENGINES: Engines = {
    "ring": (Style("R", 0, True), "ring: the state is rounded when its history is folded"),
    "commit": (Style("C", 0, False), "verify and commit: rounded after every accepted block"),
    "decode": (Style("D", 1, False), "decode in place: rounded after every token"),
}
LAST = 1000  # tokens that the sentence is about


@dataclass(frozen=True)
class RingDrift:
    """Relative L2 distance of the states from fp64, mean and maximum of every `span` tokens, for each of ENGINES."""

    span: int
    block: int
    capacity: int
    date: str
    torch: str
    curves: Curves
    peaks: Curves

    @property
    def tokens(self) -> list[int]:
        return [self.span * (i + 1) for i in range(len(self.curves["ring"]))]

    def last(self, engine: str) -> tuple[float, float]:
        """Mean and maximum over the last LAST tokens."""
        points = LAST // self.span
        mean = self.curves[engine][-points:]
        return sum(mean) / len(mean), max(self.peaks[engine][-points:])


def load_ring_drift(path: Path) -> RingDrift:
    """Raises SiteError naming the file for anything that is missing, not a number, or not one value per span."""
    data, where = read_json(path), str(path)
    sizes = {name: take(data, name, int, where) for name in ("tokens", "span", "block", "capacity")}
    for name, size in sizes.items():
        if size < 1:
            raise SiteError(f"{where}: {name!r} must be at least 1, got {size}")
    tokens, span = sizes.pop("tokens"), sizes["span"]
    if LAST % span or tokens < LAST:
        raise SiteError(f"{where}: {tokens} tokens in spans of {span} have no last {LAST}")
    curves, peaks = (read_curves(data, key, ENGINES, where) for key in ("curves", "peaks"))
    for key, listed in (("curves", curves), ("peaks", peaks)):
        if len(listed["ring"]) * span != tokens:
            raise SiteError(f"{where}: {key}: {len(listed['ring'])} spans of {span} are not {tokens} tokens")
    date = take(data, "date", str, where)
    parse_date(date, where)
    return RingDrift(date=date, torch=take(data, "torch", str, where), curves=curves, peaks=peaks, **sizes)


def said(drift: RingDrift) -> str:
    """The last tokens of each curve."""
    ends = []
    for name, (look, _) in ENGINES.items():
        mean, peak = drift.last(name)
        ends.append(f"{look.letter} {share(mean)} (at most {share(peak)})")
    return (
        f"Mean over the last {LAST:,} of {drift.tokens[-1]:,} tokens, accepted in blocks of 1 to {drift.block}, with a "
        f"history of up to {drift.capacity}: {', '.join(ends)}."
    )


def ring_drift_report(path: Path) -> str:
    """Chart, legend and one line that says what was recorded when."""
    drift = load_ring_drift(path)
    title = "Distance of the state from fp64"
    desc = f"Relative L2 distance, mean of every {drift.span} tokens. {said(drift)}"
    made = f"Computed in the references' arithmetic on {drift.date[:10]} (torch {drift.torch})."
    return (
        f"{drawn('ring-drift', title, desc, ENGINES, drift.curves, drift.tokens, 'exact')}\n\n"
        f"{esc(said(drift))} {esc(made)}\n"
    )
