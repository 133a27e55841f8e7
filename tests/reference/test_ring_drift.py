"""Gate 5: the recorded error of states over many tokens is what the references compute, and least with the ring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reference.ring
from kernels.replay.ring import Window
from reference.gating import gates
from reference.recurrence import per_value_head, softmax_scale
from specs._render.ring_drift import load_ring_drift
from tests.gate_engine import Evidence
from tests.reference import ring_drift
from tests.reference.cases import rel_l2
from tests.reference.drift import HV, POOL, H, K, V, draw

POINTS = 4
SMALL = 200  # tokens


@pytest.mark.criterion("5.34")
def test_the_record_is_what_the_references_compute(evidence: Evidence) -> None:
    recorded = load_ring_drift(ring_drift.RECORD)
    assert recorded.tokens[-1] == ring_drift.TOKENS and recorded.span == ring_drift.SPAN
    assert (recorded.block, recorded.capacity) == (ring_drift.BLOCK, ring_drift.CAPACITY)
    computed = ring_drift.compute(POINTS)
    for key, found in (("curves", recorded.curves), ("peaks", recorded.peaks)):
        for name, values in computed[key].items():
            # another CPU adds in another order, which moves a rounding here and there
            off = max(abs(x - y) / y for x, y in zip(values, found[name][:POINTS], strict=True))
            evidence.at_most(f"{key} of {name}: largest relative deviation from the record", off, 0.02)


@pytest.mark.criterion("5.34")
def test_the_ring_drifts_less_than_decode(evidence: Evidence) -> None:
    recorded = load_ring_drift(ring_drift.RECORD)
    evidence.at_least("recorded tokens", recorded.tokens[-1], 10_000)
    (mean, peak), (decode_mean, decode_peak) = recorded.last("ring"), recorded.last("decode")
    evidence.at_most("ring, last 1,000 tokens: mean distance from fp64, limit decode's", mean, decode_mean)
    evidence.at_most("ring, last 1,000 tokens: largest distance from fp64, limit decode's", peak, decode_peak)
    largest, decode_largest = (max(recorded.peaks[name]) for name in ("ring", "decode"))
    evidence.at_most("ring, all tokens: largest distance from fp64, limit decode's", largest, decode_largest)


def steady_gates(A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor, neg: bool) -> tuple[Tensor, Tensor]:
    """Gates with the same bits whichever tokens are beside: torch's sigmoid has others in the tail of a vector."""
    padded = (torch.nn.functional.pad(x, (0, 0, 0, 64 - len(x))) for x in (a, b))
    g, beta = gates(A_log, next(padded), dt_bias, next(padded), neg)
    return g[: len(a)], beta[: len(a)]


@pytest.mark.criterion("5.34")
def test_the_curve_of_the_ring_is_that_of_its_reference(evidence: Evidence) -> None:
    """Every verify has `BLOCK` tokens; those that are rejected come again."""
    raw, blocks = draw(ring_drift.TOKENS), [block for block in ring_drift.accepted() if block.stop <= SMALL]
    x = raw.prepared(torch.float32)
    most, capacity = ring_drift.BLOCK, ring_drift.CAPACITY
    pool, slot = torch.zeros(1, HV, V, K, dtype=POOL), torch.zeros(1, dtype=torch.int32)
    window = Window.allocate(pool, H, max_tokens=most, capacity=capacity)
    starts = torch.tensor([0, most], dtype=torch.int32)
    differing, outputs, expected = 0, [], []
    for block, (states, stored) in zip(blocks, ring_drift.ring(x, blocks), strict=True):
        fed = slice(block.start, block.start + most)
        q, k, v, a, b = (tensor[fed] for tensor in (raw.q, raw.k, raw.v, raw.a, raw.b))
        o, count = torch.empty(v.shape), block.stop - block.start
        reference.ring.verify(
            q, k, v, a, b, raw.A_log, raw.dt_bias, pool, slot, starts, o, (window.k, window.v, window.a, window.b),
            window.cursors, window.marks, gates=steady_gates,
        )  # fmt: skip
        reference.ring.accept(
            window.cursors, slot, torch.tensor([count]), rows=window.rows, capacity=capacity, max_tokens=most
        )
        differing += int((pool[0] != stored).sum())
        outputs.append(o[:count])
        queries = per_value_head(x.q[block] * softmax_scale(None, K), HV)
        expected.append(torch.einsum("tnvk,tnk->tnv", states, queries))
    evidence.at_least("folds", int(window.cursors[0, reference.ring.FOLD]), 10)
    evidence.equal("elements of the pool that differ from the reference's, after every verify", differing, 0)
    error = rel_l2(torch.cat(outputs), torch.cat(expected))
    evidence.at_most("outputs of the reference against those of the compared states, relative L2", error, 1e-6)


@pytest.mark.criterion("5.34")
def test_recording_is_explicit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1e-3] * (ring_drift.TOKENS // ring_drift.SPAN)
    made = {key: dict.fromkeys(ring_drift.ENGINES, values) for key in ("curves", "peaks")}
    monkeypatch.setattr(ring_drift, "RECORD", tmp_path / "ring-drift.json")
    monkeypatch.setattr(ring_drift, "compute", lambda: made)
    ring_drift.main([])
    assert not ring_drift.RECORD.exists()
    ring_drift.main(["--record"])
    assert load_ring_drift(ring_drift.RECORD).curves["ring"] == tuple(values)
    assert json.loads(ring_drift.RECORD.read_text())["tokens"] == ring_drift.TOKENS
