"""Device time of a launch: CUDA-graph replay of many launches, medians over interleaved rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: device time that one replay should take; what surrounds a graph costs some 10 us, half a percent of it
REPLAY_US = 2000.0


class Replay:
    """A CUDA graph of many launches of one implementation, which visit its `ways` in turn.

    Needs a CUDA device. `launch(way)` is called on a side stream: first to warm up and compile, then to be captured.
    """

    def __init__(self, launch: Callable[[int], Any], ways: int) -> None:
        self.launch = launch  # keeps alive what the graph points to: a graph owns no memory but its own allocations
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for way in range(min(3, ways)):
                launch(way)
            self.stream.synchronize()
            self.launches = min(ways, 8)
            self.graph = self._capture(ways)
            self.round()
            repeats = REPLAY_US / max(self.round(), 0.5) / ways
            self.launches = max(2, ways * math.ceil(repeats))
            self.graph = self._capture(ways)

    def _capture(self, ways: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for i in range(self.launches):
                self.launch(i % ways)
        finally:
            graph.capture_end()
        return graph

    def round(self) -> float:
        """Replay once: microseconds per launch."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.launches


def interleave(rounds: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """`count` rounds of each, taking turns, each turn beginning with another one; one unrecorded turn first.

    Whatever drifts (clocks, temperature) then meets all of them alike.
    """
    names = list(rounds)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        rounds[name]()
    for turn in range(count):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            samples[name].append(rounds[name]())
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def spread(samples: list[float]) -> float:
    """Interquartile range as a share of the median; 0 for fewer than four samples."""
    if len(samples) < 4:
        return 0.0
    quartiles = statistics.quantiles(samples, n=4)
    return (quartiles[2] - quartiles[0]) / quartiles[1]


def host_microseconds(call: Callable[[], Any], calls: int = 200) -> float:
    """Median over five runs of the host's time for one of `calls` eager calls that nobody waits for."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(found)
