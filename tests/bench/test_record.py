"""Records: whole after every shape, resumed honestly, compared by the rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import machine as machine_facts
from tests.bench import session as session_module
from tests.bench.ceilings import Ceiling
from tests.bench.fakes import Fake
from tests.bench.problem import Shape
from tests.bench.record import Record, Row, is_slower, slower_rows
from tests.bench.session import CannotResume, Session

SHAPE = Shape("decode", 1, 1, 1, 2)
OTHER = Shape("decode", 2, 1, 1, 2)


def row(us: float | None, impl: str = "kernels/x", shape: Shape = SHAPE) -> Row:
    return Row(shape, impl, us, 1.0, 0.5, True, 0.01, {"o": 1.7e-3}, "")


def record(*rows: Row, commit: str = "abc") -> Record:
    return Record("cpu", "2026-01-01T00:00:00+00:00", commit, {"torch": "2"}, {"p()": "0" * 64}, {}, list(rows))


@pytest.mark.criterion("7.5")
def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "bench.sm90.json"
    before = record(row(1.25), row(None, "peer-1/x"), row(2.5, shape=OTHER))
    before.ceilings = {"read": Ceiling(4370.0, "GB/s", "how")}
    before.starts = [{"impl": "kernels/x", "what": "eager-call", "value": 12.5, "unit": "us", "note": ""}]
    before.write(path)
    assert Record.read(path) == before
    keys = {
        "op",
        "N",
        "T",
        "H",
        "HV",
        "pool",
        "cold",
        "impl",
        "us",
        "gbps",
        "share",
        "checked",
        "spread",
        "errors",
        "note",
    }
    assert all(set(item) == keys for item in json.loads(path.read_text())["rows"])
    assert sum("kernels/x" in line for line in path.read_text().splitlines()) == 3, "a row is a line"


@pytest.mark.criterion("7.5")
@pytest.mark.parametrize("text", ("", "{", "[]", '{"rows": []}', '{"rows": [{"op": "decode"}]}'))
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="is no benchmark record"):
        Record.read(tmp_path / "x.json")


@pytest.mark.criterion("7.5")
def test_the_rule_of_regression() -> None:
    """Both 5 % and 0.8 us: a share alone would flag the jitter of small kernels, microseconds that of large ones."""
    assert not is_slower(2.7, 2.0), "0.7 us is noise, whatever share it is"
    assert not is_slower(103.0, 100.0), "3 % is noise, however many us"
    assert is_slower(2.9, 2.0) and is_slower(106.0, 100.0)
    assert not is_slower(90.0, 100.0)
    baseline = record(row(10.0), row(None, "kernels/y"), row(10.0, shape=OTHER))
    now = [row(12.0), row(12.0, "kernels/y"), row(12.0, "kernels/z"), row(None, shape=OTHER)]
    assert slower_rows(now, baseline) == {(SHAPE, "kernels/x"): 10.0}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """start(commit, resume=...) -> a session on fake implementations and no device."""
    monkeypatch.setattr(machine_facts, "device_name", lambda: "cpu")
    monkeypatch.setattr(session_module, "measure_ceilings", lambda *_: {"read": Ceiling(1.0, "GB/s", "")})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    class Properties:
        L2_cache_size = 1

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    def start(commit: str = "abc", *, resume: bool = False, baseline: Record | None = None) -> Session:
        implementations: list[Any] = [Fake("kernels/x"), Fake("peer-1.2/y")]
        return Session.start(tmp_path / "bench.sm90.json", implementations, commit, resume=resume, baseline=baseline)

    return start


def measured_as(monkeypatch: pytest.MonkeyPatch, *results: float) -> list[Shape]:
    """Each call of measure() gives kernels/x the next of `results`, peer-1.2/y always 5 us; returns what was asked."""
    asked: list[Shape] = []
    left = list(results)

    def measure(shape: Shape, *_: Any) -> tuple[list[Row], dict[Any, Any]]:
        asked.append(shape)
        rows = [row(left.pop(0), "kernels/x", shape), row(5.0, "peer-1.2/y", shape)]
        return rows, {r.impl: [r.us] for r in rows}

    monkeypatch.setattr(session_module, "measure", measure)
    return asked


@pytest.mark.criterion("7.5")
def test_every_shape_is_on_disk_before_the_next(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = started()
    asked = measured_as(monkeypatch, 1.0, 2.0)
    assert session.row(SHAPE, "kernels/x").us == 1.0
    assert session.row(SHAPE, "peer-1.2/y").us == 5.0
    assert asked == [SHAPE], "one measurement fills all rows of a shape"
    assert [r.us for r in Record.read(session.path).rows] == [1.0, 5.0]
    session.row(OTHER, "kernels/x")
    assert len(Record.read(session.path).rows) == 4
    assert Record.read(session.path).versions["peer"] == "1.2"


@pytest.mark.criterion("7.5")
def test_a_run_is_resumed_by_its_own_commit_only(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured_as(monkeypatch, 1.0, 2.0, 3.0)
    started().row(SHAPE, "kernels/x")
    again = started(resume=True)
    assert again.row(SHAPE, "kernels/x").us == 1.0 and asked == [SHAPE], "what was measured is kept"
    again.row(OTHER, "kernels/x")
    assert asked == [SHAPE, OTHER]
    with pytest.raises(CannotResume, match="by commit abc, this is cpu and def"):
        started("def", resume=True)
    assert started().record.rows == [], "without resume a run begins again"


@pytest.mark.criterion("7.5")
@pytest.mark.parametrize(("results", "said"), (((12.0, 12.5), True), ((12.0, 10.1), False), ((10.2,), False)), ids=str)
def test_slower_is_said_after_the_second_time(
    results: tuple[float, ...], said: bool, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = started(baseline=record(row(10.0)))
    asked = measured_as(monkeypatch, *results)
    assert session.row(SHAPE, "kernels/x").us == results[-1]
    assert len(asked) == len(results)
    assert session.slower == ({(SHAPE, "kernels/x"): (results[-1], 10.0)} if said else {})


@pytest.mark.criterion("7.5")
def test_starts_replace_their_kind(started: Any) -> None:
    session = started()
    session.note_start("kernels/x", "eager-call", 9.0, "us")
    session.note_start("kernels/x", "first-call", 9.0, "s")
    session.note_start("kernels/x", "eager-call", 8.0, "us")
    found = [(s["what"], s["value"]) for s in Record.read(session.path).starts]
    assert sorted(found) == [("eager-call", 8.0), ("first-call", 9.0)]
