"""One benchmark run: ceilings first, then shape after shape; every row is on disk before the next shape begins."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels import runtime
from tests import machine as machine_facts
from tests.bench.ceilings import measure_ceilings
from tests.bench.check import is_ours
from tests.bench.implementation import Implementation
from tests.bench.measure import measure
from tests.bench.problem import Shape
from tests.bench.record import Record, Row, slower_rows
from tests.bench.shapes import QUICK_TOKENS


class CannotResume(ValueError):
    """The unfinished run was made by another commit or on another device."""


@dataclasses.dataclass
class Session:
    """What is measured goes to `path`; `baseline` is the record that rows are compared with (None: no comparison)."""

    path: Path
    implementations: list[Implementation]
    record: Record
    baseline: Record | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cuda"))
    samples: dict[tuple[Shape, str], list[float]] = dataclasses.field(default_factory=dict)
    slower: dict[tuple[Shape, str], tuple[float, float]] = dataclasses.field(default_factory=dict)  # (now, recorded)

    @classmethod
    def start(
        cls, path: Path, implementations: list[Implementation], commit: str, *, resume: bool, baseline: Record | None
    ) -> Session:
        """A new run, or with `resume` the one in `path` if there is one. Raises CannotResume."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        here = [i.name.partition("/")[0] for i in implementations if not is_ours(i.name) and not i.absent()]
        versions = machine_facts.versions() | dict(peer.rsplit("-", 1) for peer in here)
        record = Record(machine_facts.device_name(), now, commit, versions)
        if resume and path.exists():
            before = Record.read(path)
            if (before.device, before.commit) != (record.device, record.commit):
                raise CannotResume(
                    f"{path} was measured on {before.device} by commit {before.commit}, this is {record.device} and "
                    f"{record.commit}: run without --resume to begin again"
                )
            record = dataclasses.replace(before, date=now, versions=before.versions | versions)
        session = cls(path, implementations, record, baseline)
        if not record.ceilings:
            record.ceilings = measure_ceilings(session.device, QUICK_TOKENS)
            session.write()
        return session

    def write(self) -> None:
        self.record.sources = dict(sorted({**self.record.sources, **runtime.SOURCES}.items()))
        self.record.write(self.path)

    def row(self, shape: Shape, impl: str) -> Row:
        """The row of one implementation; measures all implementations of the shape unless that is done."""
        found = self.find(shape, impl)
        if found is None:
            self.measure(shape)
            found = self.find(shape, impl)
        if found is None:
            raise LookupError(f"{impl} has no row of {shape}")
        return found

    def find(self, shape: Shape, impl: str) -> Row | None:
        return next((row for row in self.record.rows if row.key == (shape, impl)), None)

    def measure(self, shape: Shape) -> None:
        """Fill in the rows of a shape. One that is slower than the record is measured twice before it is said so."""

        def once() -> tuple[list[Row], dict[str, list[float]]]:
            torch.cuda.empty_cache()
            l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            return measure(shape, self.implementations, self.record.ceilings, self.device, l2_bytes)

        rows, samples = once()
        if self.baseline is not None and (suspects := slower_rows(rows, self.baseline)):
            rows, samples = once()
            again = slower_rows(rows, self.baseline)
            us = {row.key: row.us for row in rows}
            self.slower |= {key: (us[key] or 0.0, again[key]) for key in suspects if key in again}
        self.record.rows += rows
        self.samples |= {(shape, impl): values for impl, values in samples.items()}
        self.write()

    def note_start(self, impl: str, what: str, value: float, unit: str, note: str = "") -> None:
        """Add to `starts`, in place of an earlier value of the same impl and kind."""
        kept = [s for s in self.record.starts if (s["impl"], s["what"]) != (impl, what)]
        self.record.starts = [*kept, {"impl": impl, "what": what, "value": value, "unit": unit, "note": note}]
        self.write()


class DeviceClock:
    """A pytest-benchmark timer that tells device time: `advance` lets it pass as much as the next sample took.

    pytest-benchmark reads its timer before and after a round; the rounds were measured before, interleaved with those
    of the peers, which it could not have done itself.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: list[float] = []

    def __call__(self) -> float:
        return self.now

    def play(self, microseconds: list[float]) -> Callable[[], Any]:
        self.pending = list(microseconds)
        return self.advance

    def advance(self) -> None:
        self.now += self.pending.pop(0) * 1e-6
