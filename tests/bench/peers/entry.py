"""What the adapters share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.bench.check import Tokens
from tests.bench.implementation import Bound
from tests.bench.peers import found
from tests.bench.problem import Problem

DENSE = "contiguous q, k, v, prepared before"


class Entry:
    """One entry point of a peer. Subclasses say which, and implement `bind`."""

    peer: str
    entry: str
    ops: frozenset[str]
    note: str = ""

    def __init__(self) -> None:
        self.name = f"{found.label(self.peer)}/{self.entry}"

    def absent(self) -> str:
        return found.absence(self.peer)

    def bind(self, problem: Problem) -> Bound:
        """Raises Unsupported for a shape outside the peer."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


class Calls:
    """A launch that keeps what each way's last call returned: outputs stay alive, and apart, as in a model's layers."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call
        self.returned: dict[int, Any] = {}

    def __call__(self, way: int) -> None:
        self.returned[way] = self.call(way)


def per_request(problem: Problem, tokens: Tensor) -> Tensor:
    """[N * T, ...] or [1, N * T, ...] as [N, T, ...]."""
    return tokens.reshape(problem.shape.N, problem.shape.T, *tokens.shape[-2:])


def true_snapshots(problem: Problem) -> Tensor:
    """[N, T, HV, V, K] in the pool's dtype: way 0's state after every token, rounded from fp64."""
    tokens = Tokens.of(problem, problem.mixed, problem.a, problem.b)
    S, states = problem.initial.double(), torch.empty_like(problem.snapshots[0])
    for t in range(problem.shape.T):
        S = tokens.step(S, t)[0]
        states[:, t] = S.to(states.dtype)
    return states
