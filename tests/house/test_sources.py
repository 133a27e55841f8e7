"""What a checkout says it generates for the labels that records name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels import runtime
from probes import grid_limit
from tests import sources

X, Y = (runtime.Program("probes.grid_limit", grid_limit.Config(axis)).label for axis in "xy")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, its records and outcomes."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "RECORDS", tmp_path / "specs" / "results")
    monkeypatch.setattr(sources, "CACHE", tmp_path / ".gates" / "sources.json")
    monkeypatch.setattr(sources, "LOWERED", tmp_path / "specs" / "results" / "lowered.json")
    monkeypatch.setattr(runtime, "SOURCES", {})
    monkeypatch.setattr(runtime, "lowered_cache", None)
    return tmp_path


def record(path: Path, *labels: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sources": dict.fromkeys(labels, "recorded hash")}))


def test_a_small_program(root: Path) -> None:
    program = runtime.Program.from_label(X)
    expected = runtime.lower(program).sha256
    assert sources.generate([X], {}) == {X: (runtime.lowering_key(program), expected)}
    assert sources.generate([], {}) == {}


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("probes.no_such_probe(K=1)", "there is no module"),
        ("probes.grid_limit(axis='x', depth=1)", "does not fit"),
        ("probes.grid_limit", "not a program label"),
        ("probes.gemm_shapes(M=1, N=32)", "Error: "),  # TileLang refuses one row
    ],
)
def test_what_no_longer_builds_has_no_hash(
    label: str, text: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sources.generate([label, X], {})
    assert found[label] == ("", "") and len(found[X][1]) == 64
    (line,) = (line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if label in line)
    assert text in line


def test_labels_of_records_and_of_local_outcomes(root: Path) -> None:
    assert sources.recorded_labels(sources.RECORDS) == set()
    record(root / "specs" / "results" / "gate0.cpu.json", X)
    record(root / "specs" / "results" / "gate3.sm90.json", X, Y)
    record(root / "specs" / "results" / "bench.json", "no gate")
    assert sources.recorded_labels(sources.RECORDS) == {X, Y}


def test_the_file_answers_every_label_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(root / "specs" / "results" / "gate0.cpu.json", X)
    record(root / ".gates" / "gate0.cpu.json", Y)
    asked: list[set[str]] = []
    generate = sources.generate

    def count(labels: set[str], lowered: dict[str, str]) -> dict[str, tuple[str, str]]:
        asked.append(set(labels))
        return generate(labels, lowered)

    monkeypatch.setattr(sources, "generate", count)
    sources.main()
    first = json.loads(sources.CACHE.read_text())
    assert set(first) == {X, Y} and first[X] != first[Y]
    assert {len(sha256) for sha256 in first.values()} == {64}

    sources.main()  # nothing changed
    (root / "kernels").mkdir()
    (root / "kernels" / "step.py").write_text("a program's text")
    sources.main()  # everything may have changed
    (root / "specs" / "results" / "gate0.cpu.json").unlink()
    sources.main()  # one label is gone
    assert asked == [{X, Y}, set(), {X, Y}, set()]
    assert json.loads(sources.CACHE.read_text()) == {Y: first[Y]}


@pytest.mark.parametrize("left", [0, 20])
def test_a_damaged_file_is_made_again(root: Path, left: int) -> None:
    record(root / ".gates" / "gate0.cpu.json", X)
    sources.main()
    first = sources.CACHE.read_text()
    sources.CACHE.write_text(first[:left])
    sources.main()
    assert sources.CACHE.read_text() == first


def test_what_the_file_of_keys_knows_is_not_lowered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a program that is in it as it is built here; another one, or none there, is lowered."""
    record(root / "specs" / "results" / "gate0.cpu.json", X)
    record(root / ".gates" / "gate0.cpu.json", Y)
    sources.main(["--record"])
    first, keys = json.loads(sources.CACHE.read_text()), json.loads(sources.LOWERED.read_text())
    assert keys == {runtime.lowering_key(runtime.Program.from_label(X)): first[X]}
    lowered: list[str] = []
    lower = runtime.lower

    def watched(program: runtime.Program) -> runtime.Lowered:
        lowered.append(program.label)
        return lower(program)

    monkeypatch.setattr(runtime, "lower", watched)
    for kept, expected in ((keys, [Y]), (dict.fromkeys(keys, ""), [X, Y]), ({}, [X, Y])):
        sources.CACHE.unlink()
        sources.LOWERED.write_text(json.dumps(kept))
        lowered.clear()
        sources.main()
        assert lowered == expected and json.loads(sources.CACHE.read_text()) == first


def test_the_committed_keys_say_what_is_generated() -> None:
    """Of the recorded programs a few, each lowered here; of no program that a record names another text."""
    keys = json.loads(sources.LOWERED.read_text())
    recorded = sorted(sources.recorded_labels(sources.RECORDS))
    found: dict[str, tuple[str, str]] = {}
    for quick_to_lower in ("probes.", "kernels.decode.paged"):
        labels = [label for label in recorded if label.startswith(quick_to_lower)]
        found |= sources.generate(labels[:: len(labels) // 3], {})
    assert len(found) >= 6
    for label, (key, sha256) in found.items():
        assert keys.get(key, sha256) == sha256, label
    assert any(key in keys for key, _ in found.values())
