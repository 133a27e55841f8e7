"""The record of the benchmark, read strictly, and the questions that pages ask of it.

A record is one run on one GPU: rows of measured launches, and the memory ceilings of the same run. What contradicts
itself stops the build: a time of an output that nobody checked, a share that is not the rate over its ceiling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from specs._render.reading import Run, SiteError, run_fields, take

#: op -> what one launch of it does
OPS = {
    "verify-snapshots": "T tokens per request, the state kept after each of them",
    "verify-replay": "T tokens per request, outputs only; the pool keeps the state before them",
    "commit": "the accepted state of each request into the pool",
    "ring": "T tokens per request behind a history of accepted ones; where that is full, it is folded into the pool",
    "decode": "T tokens per request, the state in the pool updated in place",
    "decode-dense": "T tokens per request from a dense fp32 state to another, K-major; gates computed before",
    "decode-ring": "decode behind a history of tokens; where that is full, it is folded into the pool",
    "prepass": "gates and norms of all tokens, once, ahead of the kernel",
}
POOLS = ("bf16", "fp16", "fp32")
OURS = "kernels/*"
#: op -> the ceiling its traffic is held to, "read" for any other; verify-snapshots takes the nearest measured T
CEILING_OF = {"commit": "copy", "decode": "in-place", "decode-dense": "copy"}
CEILINGS = re.compile(r"read|write|copy|in-place|launch|snapshots-[1-9]\d*")
IMPL = re.compile(r"[\w.+-]+/[\w.+-]+")
STARTS = {"eager-call": "us", "first-call": "s", "cached-start": "s", "peak-memory": "MiB"}
#: how the note of a row without a time may begin, with `checked` false
ABSENCES = ("not here", "wrong", "not supported", "failed")


@dataclass(frozen=True, order=True)
class Shape:
    """What was launched: rows of one shape are comparable."""

    op: str
    N: int
    T: int
    H: int = 16
    HV: int = 32
    pool: str = "bf16"
    cold: bool = True  # the states rotate through more memory than the L2 cache holds

    @property
    def text(self) -> str:
        state = "" if self.cold else ", warm"
        return f"{self.op}, N = {self.N}, T = {self.T}, {self.H}/{self.HV} heads, {self.pool}{state}"


@dataclass(frozen=True)
class Row:
    """One implementation on one shape."""

    shape: Shape
    impl: str
    us: float | None  # median of one launch; None: not timed
    gbps: float | None
    share: float | None  # of the ceiling that applies
    checked: bool
    spread: float | None
    errors: Mapping[str, float]
    note: str

    @property
    def ours(self) -> bool:
        return fnmatchcase(self.impl, OURS)

    @property
    def time(self) -> float:
        """Microseconds of a timed row."""
        assert self.us is not None
        return self.us


@dataclass(frozen=True)
class Ceiling:
    """A bound that was measured in the same run."""

    value: float
    unit: str
    how: str


@dataclass(frozen=True)
class Start:
    """One cost outside the launch."""

    impl: str
    what: str
    value: float | None
    unit: str
    note: str


@dataclass(frozen=True)
class Contest:
    """The fastest of ours and the fastest peer on one shape."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """Above 1: ours is faster."""
        return self.peer.time / self.ours.time


@dataclass(frozen=True)
class Bench(Run):
    """One run of the benchmark."""

    ceilings: Mapping[str, Ceiling]
    rows: tuple[Row, ...]
    starts: tuple[Start, ...]

    @cached_property
    def by_shape(self) -> dict[Shape, list[Row]]:
        found: dict[Shape, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.shape, []).append(row)
        return found

    def timed(self, shape: Shape, impl: str = "*") -> list[Row]:
        """The checked and timed rows whose implementation matches the pattern, the fastest first."""
        rows = [row for row in self.by_shape.get(shape, []) if row.us is not None and fnmatchcase(row.impl, impl)]
        return sorted(rows, key=lambda row: row.time)

    def fastest(self, shape: Shape, impl: str = OURS) -> Row | None:
        return next(iter(self.timed(shape, impl)), None)

    def best_peer(self, shape: Shape) -> Row | None:
        return next((row for row in self.timed(shape) if not row.ours), None)

    def contest(self, shape: Shape) -> Contest | None:
        """None where no row of ours or no peer was timed."""
        ours, peer = self.fastest(shape), self.best_peer(shape)
        return Contest(ours, peer) if ours and peer else None

    def contests(self) -> list[Contest]:
        """Every shape on which ours and a peer were timed."""
        found = (self.contest(shape) for shape in self.by_shape)
        return [contest for contest in found if contest]


def applicable(ceilings: Mapping[str, Ceiling], shape: Shape) -> list[str]:
    """The names of the ceilings that may apply to a shape: two where T is midway between two measured counts."""
    if shape.op != "verify-snapshots":
        return [name for name in (CEILING_OF.get(shape.op, "read"),) if name in ceilings]
    counts = {name: int(name.removeprefix("snapshots-")) for name in ceilings if name.startswith("snapshots-")}
    nearest = min((abs(count - shape.T) for count in counts.values()), default=0)
    return [name for name, count in counts.items() if abs(count - shape.T) == nearest]


def real(data: Any, key: str, where: str, low: float, high: float = math.inf, *, null: bool = True) -> float | None:
    """`data[key]`, a finite number in [low, high], or None if `null` allows it."""
    if not isinstance(data, dict) or key not in data:
        raise SiteError(f"{where}: {key!r} is missing")
    value = data[key]
    if value is None and null:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SiteError(f"{where}: {key!r} must be a finite number{' or null' * null}, got {value!r}")
    if not low <= value <= high:
        raise SiteError(f"{where}: {key!r} must be in [{low:g}, {high:g}], got {value!r}")
    return float(value)


def parse_shape(data: Any, where: str) -> Shape:
    op, pool = take(data, "op", str, where), take(data, "pool", str, where)
    if op not in OPS:
        raise SiteError(f"{where}: unknown op {op!r}, expected one of {', '.join(OPS)}")
    if pool not in POOLS:
        raise SiteError(f"{where}: unknown pool {pool!r}, expected one of {', '.join(POOLS)}")
    sizes = {key: take(data, key, int, where) for key in ("N", "T", "H", "HV")}
    if min(sizes.values()) < 1 or sizes["HV"] % sizes["H"]:
        raise SiteError(f"{where}: N, T, H and HV must be positive and H must divide HV, got {sizes}")
    return Shape(op, sizes["N"], sizes["T"], sizes["H"], sizes["HV"], pool, take(data, "cold", bool, where))


def parse_row(data: Any, where: str) -> Row:
    shape, impl = parse_shape(data, where), take(data, "impl", str, where)
    where = f"{where} ({impl} on {shape.text})"
    if not IMPL.fullmatch(impl):
        raise SiteError(f"{where}: 'impl' must be kernels/<program> or <peer>-<version>/<entry>, got {impl!r}")
    errors = take(data, "errors", dict, where)
    row = Row(
        shape=shape,
        impl=impl,
        us=real(data, "us", where, 1e-3),
        gbps=real(data, "gbps", where, 0),
        # a peer with another layout may beat the layout of the ceiling; the L2 cache, where warm, beats memory
        share=real(data, "share", where, 0, 1.5 if shape.cold else math.inf),
        checked=take(data, "checked", bool, where),
        spread=real(data, "spread", where, 0),
        errors={name: real(errors, name, f"{where} errors", 0, null=False) or 0.0 for name in errors},
        note=take(data, "note", str, where),
    )
    said = contradiction(row)
    if said:
        raise SiteError(f"{where}: {said}")
    return row


def contradiction(row: Row) -> str:
    """How a row contradicts itself; "" if it does not."""
    word = next((word for word in ABSENCES if row.note.startswith(f"{word}: ")), None)
    if row.us is not None:
        if not row.checked:
            return "has a time, but its output was not checked"
        if row.gbps is None or row.spread is None:
            return "has a time, so it must have 'gbps' and 'spread'"
        return f"has a time, but its note says {word!r}" if word else ""
    if row.share is not None and row.gbps is None:
        return "has a share of a rate that it does not have"
    if row.gbps is not None or row.spread is not None:
        return "was not timed, so 'gbps', 'share' and 'spread' must be null"
    if not row.note:
        return "was not timed, and its note does not say why"
    if row.checked and word:
        return f"its note says {word!r}, so 'checked' must be false"
    return ""


def parse_ceilings(data: Any, file: str) -> dict[str, Ceiling]:
    found = {}
    for name, item in take(data, "ceilings", dict, file).items():
        where = f"{file} ceiling {name!r}"
        unit = take(item, "unit", str, where)
        if not CEILINGS.fullmatch(name):
            raise SiteError(f"{where}: unknown; expected read, write, copy, in-place, snapshots-<T> or launch")
        if unit != ("us" if name == "launch" else "GB/s"):
            raise SiteError(f"{where}: unexpected unit {unit!r}")
        value = real(item, "value", where, 1e-3, null=False)
        assert value is not None
        found[name] = Ceiling(value, unit, take(item, "how", str, where))
    return found


def parse_start(data: Any, where: str) -> Start:
    impl, what, unit, note = (take(data, key, str, where) for key in ("impl", "what", "unit", "note"))
    if not IMPL.fullmatch(impl) or STARTS.get(what) != unit:
        known = ", ".join(f"{name} in {measure}" for name, measure in STARTS.items())
        raise SiteError(f"{where}: {what!r} in {unit!r} of {impl!r}: expected an implementation and one of {known}")
    value = real(data, "value", where, 0)
    if value is None and not note:
        raise SiteError(f"{where}: no value, and the note does not say why")
    return Start(impl, what, value, unit, note)


def check_shares(bench: Bench) -> None:
    """Each share must be what its rate and this run's ceilings give, to 2 %."""
    for i, row in enumerate(bench.rows, 1):
        names = applicable(bench.ceilings, row.shape)
        if row.share is None or row.gbps is None:
            continue
        expected = [row.gbps / bench.ceilings[name].value for name in names]
        if not any(abs(row.share - value) <= 0.02 * value + 0.005 for value in expected):
            found = " or ".join(f"{value:.3f} of {name}" for value, name in zip(expected, names, strict=True))
            raise SiteError(
                f"{bench.file} row {i} ({row.impl} on {row.shape.text}): 'share' is {row.share:g}, "
                f"but {row.gbps:g} GB/s are {found or 'a share of no recorded ceiling'}"
            )


def parse_bench(data: Any, file: str, *, recorded: bool) -> Bench:
    """A benchmark record from its parsed JSON. Raises SiteError naming `file` and the row, counted from 1."""
    rows: dict[tuple[Shape, str], Row] = {}
    for i, item in enumerate(take(data, "rows", list, file), 1):
        row = parse_row(item, f"{file} row {i}")
        if (row.shape, row.impl) in rows:
            raise SiteError(f"{file} row {i}: {row.impl} on {row.shape.text} is there twice")
        rows[row.shape, row.impl] = row
    bench = Bench(
        **run_fields(data, file, Path(file).stem.rpartition(".")[2], recorded=recorded),
        ceilings=parse_ceilings(data, file),
        rows=tuple(rows.values()),
        starts=tuple(
            parse_start(item, f"{file} start {i}") for i, item in enumerate(take(data, "starts", list, file), 1)
        ),
    )
    if not bench.sources and any(row.ours and row.checked for row in bench.rows):
        raise SiteError(f"{file}: rows of kernels/, but no 'sources' that say which kernels")
    check_shares(bench)
    return bench
