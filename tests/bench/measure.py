"""One shape, all implementations: bind, check, capture, then time them in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.bench import check, timing
from tests.bench.ceilings import Ceiling, ceiling_of
from tests.bench.check import is_ours
from tests.bench.implementation import Implementation, Unsupported
from tests.bench.problem import Problem, Shape
from tests.bench.record import Row

ROUNDS = 11


@dataclasses.dataclass
class Lane:
    """A checked implementation: `round()` replays it once and gives microseconds per launch; NaN once it `failed`."""

    errors: dict[str, float]
    wrong: str
    round: Callable[[], float]
    release: Callable[[], None]
    failed: str = ""


def local_lane(implementation: Implementation, problem: Problem) -> Lane:
    """Runs in this process, on the shared problem. Raises Unsupported."""
    problem.reset()  # an implementation before this one may have moved the states on
    bound = implementation.bind(problem)
    errors = check.run_and_compare(problem, bound)
    dtypes = {name: tensor.dtype for name, tensor in bound.outputs().items()}
    wrong = check.verdict(errors, dtypes, implementation.name, problem.shape.T)
    if wrong:
        return Lane(errors, wrong, lambda: math.nan, lambda: None)
    return Lane(errors, "", timing.Replay(bound.launch, problem.ways).round, lambda: None)


def remote_lane(implementation: Any, shape: Shape, l2_bytes: int) -> Lane:
    """Runs in the implementation's own process, which builds the same problem. Raises Unsupported, RuntimeError."""
    remote = implementation.remote()
    errors, wrong = remote.prepare(shape, 0, l2_bytes)

    def round_or_nan() -> float:
        """A process that dies or hangs loses its own row, not the run."""
        if not lane.failed:
            try:
                return float(remote.round())
            except RuntimeError as error:
                lane.failed = failure(error)
        return math.nan

    lane = Lane(errors, wrong, round_or_nan, remote.release)
    return lane


def failure(error: Exception) -> str:
    """One line for a row's note."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[-1]}"[:200]


def lane_or_reason(implementation: Implementation, problem: Problem, l2_bytes: int) -> Lane | str:
    """The implementation on the problem, or in words why it cannot be timed. What breaks in ours is raised."""
    if absent := implementation.absent():
        return absent
    try:
        if hasattr(implementation, "remote"):
            return remote_lane(implementation, problem.shape, l2_bytes)
        return local_lane(implementation, problem)
    except Unsupported as reason:
        return f"not supported: {reason}"
    except Exception as error:
        if is_ours(implementation.name):
            raise
        return failure(error)  # a finding about the peer, and no reason to lose the run


def measure(
    shape: Shape,
    implementations: list[Implementation],
    ceilings: dict[str, Ceiling],
    device: torch.device,
    l2_bytes: int,
) -> tuple[list[Row], dict[str, list[float]]]:
    """Rows of every implementation of the shape's op, and the samples (us) of those that were timed."""
    rows: list[Row] = []
    lanes: dict[str, Lane] = {}
    problem = Problem(shape, device, l2_bytes)
    with contextlib.ExitStack() as cleanup:
        for implementation in implementations:
            if shape.op not in implementation.ops:
                continue
            row = Row(shape, implementation.name, note=implementation.note)
            rows.append(row)
            lane = lane_or_reason(implementation, problem, l2_bytes)
            if isinstance(lane, str):
                row.note = lane
                continue
            row.errors = {name: error for name, error in lane.errors.items() if math.isfinite(error)}
            if lane.wrong:
                row.note = lane.wrong
                lane.release()
                continue
            row.checked = True
            cleanup.callback(lane.release)
            lanes[row.impl] = lane
        samples = timing.interleave({name: lane.round for name, lane in lanes.items()}, ROUNDS)
    ceiling = ceiling_of(shape, ceilings)
    for row in rows:
        if row.impl not in samples:
            continue
        if lanes[row.impl].failed:
            row.checked, row.note = False, lanes[row.impl].failed
            del samples[row.impl]
        else:
            row.us = timing.median(samples[row.impl])
            row.spread = timing.spread(samples[row.impl])
            row.gbps = shape.bytes_moved / row.us * 1e-3
            row.share = row.gbps / ceiling.value if ceiling else None
    return rows, samples
