"""Rows of a benchmark run: written after every shape, resumed, compared with the recorded run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.bench.ceilings import Ceiling
from tests.bench.problem import Shape

#: a row is slower than the record if it is so by more than both, twice in a row
SLOWER_SHARE, SLOWER_US = 0.05, 0.8


@dataclasses.dataclass
class Row:
    """What one implementation did with one shape. us, gbps, share and spread are None where it was not timed.

    us: median microseconds of a launch. gbps: the bytes that the op must move over us. share: of the ceiling that
    applies. spread: interquartile range over median. errors: relative L2 against fp64, per output. checked: these are
    within their limits.
    """

    shape: Shape
    impl: str
    us: float | None = None
    gbps: float | None = None
    share: float | None = None
    checked: bool = False
    spread: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> tuple[Shape, str]:
        return self.shape, self.impl

    def as_json(self) -> dict[str, Any]:
        own = dataclasses.asdict(self)
        return {**own.pop("shape"), **own}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        names = [field.name for field in dataclasses.fields(Shape)]
        return cls(Shape(**{name: data[name] for name in names}), **{k: v for k, v in data.items() if k not in names})


@dataclasses.dataclass
class Record:
    """specs/results/bench.sm90.json."""

    device: str
    date: str
    commit: str
    versions: dict[str, str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    ceilings: dict[str, Ceiling] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def write(self, path: Path) -> None:
        data = {**dataclasses.asdict(self), "rows": [row.as_json() for row in self.rows]}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(_compact(data))
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises ValueError for a file that is no record."""
        try:
            data = json.loads(path.read_text())
            data["rows"] = [Row.from_json(row) for row in data["rows"]]
            data["ceilings"] = {name: Ceiling(**ceiling) for name, ceiling in data["ceilings"].items()}
            return cls(**data)
        except (OSError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no benchmark record: {type(error).__name__}: {error}") from error


def _compact(data: dict[str, Any]) -> str:
    """JSON with one row per line, so that a change of a row is a change of a line; floats to six digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return [rounded(inner) for inner in value] if isinstance(value, list) else value

    parts = []
    for key, value in rounded(data).items():
        if isinstance(value, list) and value:
            lines = ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in value)
            text = f"[\n{lines}\n ]"
        else:
            text = json.dumps(value, ensure_ascii=False, indent=1).replace("\n", "\n ")
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def is_slower(us: float, recorded: float) -> bool:
    """The regression rule: by more than 5 % and by more than 0.8 us."""
    return us > recorded * (1 + SLOWER_SHARE) and us - recorded > SLOWER_US


def slower_rows(rows: list[Row], baseline: Record) -> dict[tuple[Shape, str], float]:
    """key -> recorded us, of the rows that are slower than the record by the rule."""
    recorded = {row.key: row.us for row in baseline.rows if row.us is not None}
    return {
        row.key: before
        for row in rows
        if row.us is not None and (before := recorded.get(row.key)) is not None and is_slower(row.us, before)
    }
