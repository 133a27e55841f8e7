"""A benchmark record that contradicts itself stops the build; one that holds answers what pages ask."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specs._render.bench import CEILING_OF, OPS, Shape, applicable
from specs._render.freshness import freshness, label_state
from specs._render.reading import SiteError
from specs._render.records import load_site
from tests.bench import ceilings as measured_ceilings
from tests.bench import problem
from tests.bench import record as measured
from tests.site.bench_samples import CURRENT, LABEL, LIMIT, OURS, SEED, STALE, TRITON, bench, data, row, site, write
from tests.site.samples import record as gate_record
from tests.site.test_records import make_specs

SHAPE = Shape("verify-snapshots", 64, 12)
ABSENT = {"us": None, "gbps": None, "share": None, "spread": None, "checked": False}


def test_a_record_is_read() -> None:
    run = bench(row(), row(TRITON, 12.0), row("vllm-0.1/x", None))
    assert (run.device, run.recorded, run.name) == ("NVIDIA H200", True, "GPU, recorded")
    assert run.ceilings["launch"].unit == "us" and run.ceilings["read"].value == LIMIT
    assert [r.us for r in run.rows] == [10.0, 12.0, None]
    assert run.rows[0].shape == SHAPE and run.rows[0].errors == {"o": 1.7e-3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"op": "verify"}, "unknown op 'verify'"),
        ({"pool": "fp8"}, "unknown pool 'fp8'"),
        ({"N": 0}, "must be positive"),
        ({"HV": 24}, "H must divide HV"),
        ({"T": 1.5}, "'T' must be int"),
        ({"cold": 1}, "'cold' must be bool"),
        ({"impl": "triton"}, "'impl' must be"),
        ({"impl": "a b/<c>"}, "'impl' must be"),
        ({"checked": False}, "its output was not checked"),
        ({"us": -1.0}, "'us' must be in"),
        ({"us": math.nan}, "'us' must be a finite number or null"),
        ({"us": math.inf}, "'us' must be a finite number or null"),
        ({"us": "10"}, "'us' must be a finite number or null"),
        ({"us": True}, "'us' must be a finite number or null"),
        ({"gbps": None}, "must have 'gbps' and 'spread'"),
        ({"spread": None}, "must have 'gbps' and 'spread'"),
        ({"gbps": None, "us": None, "spread": None}, "a share of a rate that it does not have"),
        ({"share": 1.6}, r"'share' must be in \[0, 1.5\]"),
        ({"share": 0.6}, "'share' is 0.6, but 2000 GB/s are 0.500 of snapshots-12"),
        ({"errors": {"o": math.nan}}, "'o' must be a finite number, got nan"),
        ({"note": "wrong: by far"}, "its note says 'wrong'"),
        (ABSENT | {"gbps": 1.0}, "'gbps', 'share' and 'spread' must be null"),
        (ABSENT, "its note does not say why"),
        (ABSENT | {"checked": True, "note": "not here: x"}, "'checked' must be false"),
    ],
)
def test_a_row_that_contradicts_itself(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SiteError, match=said) as error:
        bench(row(TRITON), row() | changes)
    assert str(error.value).startswith("results/bench.sm90.json row 2")


@pytest.mark.parametrize("key", row())
def test_a_row_that_lacks_a_field(key: str) -> None:
    with pytest.raises(SiteError, match=f"row 1.*'{key}' is missing"):
        bench({name: value for name, value in row().items() if name != key})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": {}}, "'rows' must be list"),
        ({"rows": [7]}, "row 1: expected an object"),
        ({"rows": [row(), row()]}, "row 2: .* is there twice"),
        ({"sources": {}}, "no 'sources'"),
        ({"date": "today"}, "not an ISO date"),
        ({"ceilings": {"speed": {}}}, "'unit' is missing"),
        ({"ceilings": {"speed": {"value": 1, "unit": "GB/s", "how": ""}}}, "ceiling 'speed': unknown"),
        ({"ceilings": {"read": {"value": 1, "unit": "us", "how": ""}}}, "unexpected unit 'us'"),
        ({"ceilings": {"read": {"value": math.inf, "unit": "GB/s", "how": ""}}}, "finite number"),
        ({"ceilings": {}}, "a share of no recorded ceiling"),
        ({"starts": [{"impl": OURS, "what": "eager-call", "value": 1.0, "unit": "s", "note": ""}]}, "eager-call in us"),
        ({"starts": [{"impl": OURS, "what": "eager-call", "value": None, "unit": "us", "note": ""}]}, "say why"),
    ],
)
def test_a_record_that_contradicts_itself(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SiteError, match=said) as error:
        bench(**({"rows": [row()]} | changes))
    assert "bench.sm90.json" in str(error.value)


def test_what_differs_in_one_key_is_no_duplicate() -> None:
    changes: list[dict[str, Any]] = [{}, {"op": "decode"}, {"N": 1}, {"T": 4}, {"H": 32}, {"HV": 64}]
    changes += [{"pool": "fp32"}, {"cold": False}, {"impl": SEED}]
    assert len(bench(*(row() | change for change in changes)).by_shape) == len(changes) - 1


def test_a_warm_row_may_be_faster_than_memory() -> None:
    assert bench(row(cold=False, share=1.6)).rows[0].share == 1.6


@pytest.mark.parametrize(
    ("op", "tokens", "names"),
    [
        ("verify-snapshots", 12, ["snapshots-12"]),
        ("verify-snapshots", 1, ["snapshots-4"]),
        ("verify-snapshots", 6, ["snapshots-4", "snapshots-8"]),
        ("verify-snapshots", 64, ["snapshots-16"]),
        ("verify-replay", 12, ["read"]),
        ("ring", 4, ["read"]),
        ("prepass", 4, ["read"]),
        ("commit", 4, ["copy"]),
        ("decode", 1, ["in-place"]),
    ],
)
def test_the_ceiling_that_applies(op: str, tokens: int, names: list[str]) -> None:
    assert applicable(bench().ceilings, Shape(op, 1, tokens)) == names


def test_the_benchmark_agrees_about_ops_and_ceilings() -> None:
    assert set(OPS) == set(problem.OPS) and set(CEILING_OF) <= set(OPS)
    run = bench()
    made = {name: measured_ceilings.Ceiling(i, "GB/s", name) for i, name in enumerate(run.ceilings)}
    for op in OPS:
        for tokens in (1, 4, 6, 12, 16):
            chosen = measured_ceilings.ceiling_of(problem.Shape(op, 8, tokens), made)
            assert chosen and chosen.how in applicable(run.ceilings, Shape(op, 8, tokens))


def test_what_the_benchmark_writes_is_read(tmp_path: Path) -> None:
    shape = problem.Shape("verify-snapshots", 64, 12)
    rows = [
        measured.Row(shape, OURS, 10.123456789, 2000.0, 0.5, True, 0.01, {"o": 1.7e-3}),
        measured.Row(shape, TRITON, note="not here: install sglang"),
        measured.Row(shape, SEED, errors={"o": 0.3}, note="wrong: relative L2 error of o is 0.3, limit 0.004"),
        measured.Row(shape, "x-1/y", note="failed: RuntimeError: out of luck"),
        measured.Row(shape, "x-1/z", note="not supported: T is 12, supported: 4"),
    ]
    ceilings = {"snapshots-12": measured_ceilings.Ceiling(4000.0, "GB/s", "bare writes")}
    made = measured.Record("H200", "2026-01-02T03:04:05+00:00", "abc", {"torch": "2"}, {LABEL: "a"}, ceilings, rows)
    make_specs(tmp_path)
    made.write(tmp_path / "specs" / "results" / "bench.sm90.json")
    run = load_site(tmp_path / "specs", None).bench
    assert run is not None
    assert [r.note for r in run.rows] == [r.note for r in rows]
    assert run.timed(SHAPE)[0].us == 10.1235


def test_look_ups() -> None:
    run = bench(
        row("kernels/slow", 11.0),
        row(OURS, 10.0),
        row(SEED, 13.0),
        row(TRITON, 12.0),
        row("vllm-1/x", None),
        row(N=1),
        row(TRITON, 5.0, N=8),
    )
    contest = run.contest(SHAPE)
    assert contest and (contest.ours.impl, contest.peer.impl, contest.ratio) == (OURS, TRITON, 1.2)
    assert [r.impl for r in run.timed(SHAPE)] == [OURS, "kernels/slow", TRITON, SEED]
    assert [r.impl for r in run.timed(SHAPE, "*-*/*")] == [TRITON, SEED]
    assert run.contest(Shape("verify-snapshots", 1, 12)) is None  # no peer
    assert run.fastest(Shape("verify-snapshots", 8, 12)) is None  # none of ours
    assert run.timed(Shape("decode", 1, 1)) == []
    assert len(run.contests()) == 1


def test_load(tmp_path: Path) -> None:
    specs, local = make_specs(tmp_path), tmp_path / ".gates"
    assert load_site(specs, local).benches == ()
    write(specs / "results", data(row()))
    write(local, data(row(us=11.0)))
    loaded = load_site(specs, local)
    assert loaded.bench and loaded.local_bench
    assert (loaded.bench.rows[0].us, loaded.local_bench.rows[0].us) == (10.0, 11.0)
    assert loaded.local_bench.name == "this machine, GPU"
    assert load_site(specs, None).local_bench is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps(data(row(checked=False)))])
def test_a_corrupt_file_is_named(tmp_path: Path, text: str) -> None:
    specs = make_specs(tmp_path)
    (specs / "results" / "bench.sm90.json").write_text(text)
    with pytest.raises(SiteError, match=r"bench\.sm90\.json"):
        load_site(specs, tmp_path)


@pytest.mark.parametrize(
    ("sources", "whole"), [(CURRENT, "current"), (STALE, "stale"), ({}, "stale"), (None, "unknown")]
)
def test_freshness(sources: dict[str, str] | None, whole: str) -> None:
    found = site(row(), sources=sources)
    assert found.bench and freshness(found, found.bench) == whole


@pytest.mark.parametrize(
    ("date", "bench_is", "gate_is"), [("2026-06-01", "stale", "unknown"), ("2025-06-01", "unknown", "stale")]
)
def test_gate_records_and_the_benchmark_judge_each_other(date: str, bench_is: str, gate_is: str) -> None:
    gate = gate_record("sm90", sources={LABEL: "cccc"}, date=date)
    both = site(row(), sources=None, records=(gate,))
    assert both.bench and (freshness(both, both.bench), freshness(both, gate)) == (bench_is, gate_is)


def test_a_gate_record_may_agree() -> None:
    both = site(row(), sources=None, records=(gate_record("sm90", sources=CURRENT),))
    assert both.bench and label_state(both, both.bench, LABEL) == "agrees"
