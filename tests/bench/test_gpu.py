"""The whole way on a GPU: inputs, check, graphs, rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.bench import timing
from tests.bench.fakes import Fake
from tests.bench.measure import measure
from tests.bench.ours import ours
from tests.bench.problem import Problem, Shape

pytestmark = pytest.mark.sm90


@pytest.mark.criterion("7.8")
@pytest.mark.parametrize(
    "shape",
    (
        Shape("verify-snapshots", 3, 12, 2, 4),
        Shape("verify-snapshots", 3, 2, 2, 4),
        Shape("decode", 3, 1, 2, 4),
        Shape("decode-dense", 3, 8, 2, 4, "fp32"),
    ),
    ids=str,
)
def test_one_shape_end_to_end(shape: Shape) -> None:
    rows, samples = measure(
        shape, [*ours(), Fake("peer-1/missing", missing="not here")], {}, torch.device("cuda"), 2**20
    )
    timed = {row.impl: row for row in rows if row.us}
    assert (
        set(timed)
        == set(samples)
        == {implementation.name for implementation in ours() if shape.op in implementation.ops}
    )
    for row in timed.values():
        assert row.checked and row.gbps and row.us == timing.median(samples[row.impl]) and row.share is None


@pytest.mark.criterion("7.8")
def test_a_graph_visits_every_way() -> None:
    """Each launch of a replay counts one up in its own way's counter: all ways alike, as many as the graph says."""
    ways = 5
    counters = torch.zeros(ways, dtype=torch.int64, device="cuda")
    replay = timing.Replay(lambda way: counters[way].add_(1), ways)
    counters.zero_()
    assert replay.round() > 0
    assert counters.tolist() == [replay.launches / ways] * ways


@pytest.mark.criterion("7.8")
def test_a_graph_keeps_what_it_points_to() -> None:
    """A launch owns tensors that nobody else holds; a graph alone would replay on freed memory."""
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")

    def owner() -> Callable[[int], torch.Tensor]:
        own = torch.ones_like(counter)
        return lambda way: counter.add_(own)

    replay = timing.Replay(owner(), 1)
    counter.zero_()
    torch.cuda.empty_cache()
    junk = [torch.full((1,), 7, dtype=torch.int64, device="cuda") for _ in range(1000)]
    replay.round()
    assert len(junk) == 1000 and counter.item() == replay.launches


@pytest.mark.criterion("7.8")
def test_two_processes_would_build_the_same_problem() -> None:
    shape = Shape("verify-snapshots", 2, 3, 1, 2)
    one, two = (Problem(shape, torch.device("cuda"), 2**20) for _ in range(2))
    assert torch.equal(one.pool, two.pool) and torch.equal(one.mixed, two.mixed)
    assert all(torch.equal(a, b) for a, b in zip(one.indices, two.indices, strict=True))
