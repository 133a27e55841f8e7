"""The process in which FlashInfer runs: one JSON request per line on standard input, one JSON answer per line.

    {"do": "prepare", "entry", "shape", "seed", "l2_bytes"} -> {"result": {"errors", "wrong"}}
    {"do": "round" | "release", "entry"}                    -> {"result": microseconds or null}

or {"unsupported": why} or {"error": what}. It never imports TileLang.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import IO, Any, Protocol

import torch

from tests.bench import check, timing
from tests.bench.implementation import Bound, Unsupported
from tests.bench.peers.entry import Entry
from tests.bench.problem import Problem, Shape


class Clock(Protocol):
    """Times launches: timing.Replay, or what an entries module brings for machines without a GPU."""

    def round(self) -> float: ...


@dataclasses.dataclass
class Prepared:
    bound: Bound
    clock: Clock | None


class Server:
    """Entries by name, those that are prepared, and the one problem they share."""

    def __init__(self, entries: dict[str, Entry], clock: Callable[[Callable[[int], Any], int], Clock]) -> None:
        self.entries, self.clock = entries, clock
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.problem: Problem | None = None
        self.made_from: object = None
        self.prepared: dict[str, Prepared] = {}

    def prepare(self, entry: str, shape: dict[str, Any], seed: int, l2_bytes: int) -> dict[str, Any]:
        if self.made_from != (shape, seed, l2_bytes):
            self.prepared.clear()
            self.problem = None
            self.problem = Problem(Shape(**shape), self.device, l2_bytes, seed)
            self.made_from = (shape, seed, l2_bytes)
        problem = self.problem
        if problem is None:
            raise RuntimeError("no problem was made")
        problem.reset()  # an entry before this one may have moved the states on
        bound = self.entries[entry].bind(problem)
        errors = check.run_and_compare(problem, bound)
        wrong = check.verdict(errors, {}, "flashinfer", problem.shape.T)
        self.prepared[entry] = Prepared(bound, None if wrong else self.clock(bound.launch, problem.ways))
        return {"errors": errors, "wrong": wrong}

    def round(self, entry: str) -> float:
        clock = self.ready(entry).clock
        if clock is None:
            raise RuntimeError(f"{entry} was wrong, so it was not captured")
        return clock.round()

    def release(self, entry: str) -> None:
        self.prepared.pop(entry, None)
        if not self.prepared:
            self.problem = self.made_from = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def ready(self, entry: str) -> Prepared:
        if entry not in self.prepared:
            raise RuntimeError(f"{entry} is not prepared (its process was started anew, or it was released)")
        return self.prepared[entry]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do: dict[str, Callable[..., Any]]
        do = {"prepare": self.prepare, "round": self.round, "release": self.release}
        try:
            return {"result": do[request.pop("do")](**request)}
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def serve(server: Server, requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        answers.write(json.dumps(server.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", required=True, help="module with entries(), and perhaps a Clock of its own")
    module = importlib.import_module(parser.parse_args().entries)
    # what libraries print must not end up among the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server({entry.entry: entry for entry in module.entries()}, getattr(module, "Clock", timing.Replay))
    serve(server, sys.stdin, answers)


if __name__ == "__main__":
    main()
