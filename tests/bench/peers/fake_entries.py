"""Entries without a GPU that behave well and badly, for the tests of the worker and its proxies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.bench.check import Tokens
from tests.bench.implementation import Bound, refuse_unless
from tests.bench.peers.entry import Entry, per_request
from tests.bench.problem import Problem


class Clock:
    """Stands in for timing.Replay: a round launches every way once, and its time is the number of ways."""

    def __init__(self, launch: Callable[[int], Any], ways: int) -> None:
        self.launch, self.ways = launch, ways

    def round(self) -> float:
        for way in range(self.ways):
            self.launch(way)
        return float(self.ways)


class Right(Entry):
    """The recurrence itself."""

    peer, entry = "flashinfer", "right"
    ops = frozenset({"verify-replay"})

    def bind(self, problem: Problem) -> Bound:
        tokens, T = Tokens.of(problem, problem.mixed, problem.a, problem.b), problem.shape.T
        by_request = per_request(problem, problem.o)

        def launch(way: int) -> None:
            S = problem.pool[problem.indices[way].long()].double()
            for t in range(T):
                S, by_request[:, t] = tokens.step(S, t)

        return Bound(launch, lambda: {"o": by_request}, problem.reset)


class Wrong(Right):
    entry = "wrong"

    def bind(self, problem: Problem) -> Bound:
        bound = super().bind(problem)
        return Bound(bound.launch, lambda: {"o": bound.outputs()["o"] * 1.01}, bound.reset)


class Picky(Right):
    entry = "picky"

    def bind(self, problem: Problem) -> Bound:
        refuse_unless(problem.shape, T=(4, 8))
        return super().bind(problem)


class Raises(Right):
    entry = "raises"

    def bind(self, problem: Problem) -> Bound:
        raise ValueError("a reason\nand its details")


class Dies(Right):
    entry = "dies"

    def bind(self, problem: Problem) -> Bound:
        print("printed on standard output, which must not disturb the answers")
        os.write(2, b"last words\n")
        os._exit(3)


class Hangs(Right):
    entry = "hangs"

    def bind(self, problem: Problem) -> Bound:
        time.sleep(600)
        return super().bind(problem)


def entries() -> list[Entry]:
    return [entry() for entry in (Right, Wrong, Picky, Raises, Dies, Hangs)]
