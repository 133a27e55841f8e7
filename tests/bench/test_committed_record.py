"""What the committed record must hold for its page to be a comparison."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.bench.check import allowed, is_ours
from tests.bench.problem import DTYPES
from tests.bench.record import Record
from tests.bench.shapes import QUICK_BATCHES, QUICK_TOKENS
from tests.gate_engine import Evidence

PAGED = ("sglang", "vllm", "flashinfer")
PEERS = {"verify-snapshots": (*PAGED, "fla"), "decode": PAGED}
COMPARED = [("verify-snapshots", T) for T in QUICK_TOKENS] + [("decode", 1)]


@pytest.fixture(scope="module")
def record(pytestconfig: pytest.Config) -> Record:
    return Record.read(Path(pytestconfig.rootpath) / "specs" / "results" / "bench.sm90.json")


@pytest.mark.criterion("7.9")
@pytest.mark.parametrize(("op", "T"), COMPARED)
@pytest.mark.parametrize("N", QUICK_BATCHES)
def test_every_peer_stands_beside_us(op: str, T: int, N: int, record: Record, evidence: Evidence) -> None:
    rows = [
        row
        for row in record.rows
        if (s := row.shape).cold and (s.op, s.N, s.T, s.H, s.HV, s.pool) == (op, N, T, 16, 32, "bf16")
    ]
    assert any(is_ours(row.impl) and row.us for row in rows)
    for peer in PEERS[op]:
        own = [row for row in rows if row.impl.startswith(f"{peer}-")]
        assert any(row.us for row in own) or (own and all(row.note.startswith("not supported: ") for row in own)), peer
    timed = {row.impl.split("-")[0] for row in rows if row.us and not is_ours(row.impl)}
    evidence.at_least("peers timed at a shape", len(timed), 3)


@pytest.mark.criterion("7.9")
@pytest.mark.parametrize("N", QUICK_BATCHES)
def test_fla_stands_beside_our_decode(N: int, record: Record, evidence: Evidence) -> None:
    """It has no pool: its decode is compared from dense state to dense state, wherever the record has that."""
    rows = [
        row
        for row in record.rows
        if (s := row.shape).cold and (s.N, s.T, s.H, s.HV) == (N, 1, 16, 32) and s.op in ("decode", "decode-dense")
    ]
    shapes = {row.shape for row in rows if row.impl.startswith("fla-") and row.us}
    compared = [row for row in rows if row.shape in shapes and is_ours(row.impl) and row.us]
    evidence.at_least("decodes of ours beside FLA's", len(compared), 1)


@pytest.mark.criterion("7.9")
def test_every_timed_row_was_right(record: Record, evidence: Evidence) -> None:
    timed = [row for row in record.rows if row.us is not None]
    assert timed
    for row in timed:
        assert row.checked and row.errors and row.us and math.isfinite(row.us)
        for name, error in row.errors.items():
            stored = DTYPES["bf16" if name == "o" else row.shape.pool]
            limit = allowed(row.impl, stored, row.shape.T)
            whose = "ours" if is_ours(row.impl) else "a peer"
            evidence.at_most(f"largest error of {whose} over its limit", error / limit, 1.0)
    evidence.note("rows timed", len(timed))


@pytest.mark.criterion("7.9")
def test_what_is_not_timed_says_why(record: Record) -> None:
    for row in record.rows:
        if row.us is None:
            assert row.note.split(":")[0] in ("not here", "not supported", "wrong", "failed"), row
        else:
            assert row.gbps and row.spread is not None
    assert {"read", "write", "copy", "in-place", "launch"} <= set(record.ceilings)
