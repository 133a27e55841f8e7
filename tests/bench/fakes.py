"""The reference behind the benchmark's interface, right or wrong on purpose: for the suite's own use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tests.bench.check import Tokens
from tests.bench.implementation import Bound, Unsupported
from tests.bench.problem import OPS, Problem


@dataclasses.dataclass
class Fake:
    """Computes the recurrence in fp64 and stores it rounded to bf16; `spoil` may change what it stores."""

    name: str
    ops: frozenset[str] = frozenset(OPS)
    note: str = ""
    missing: str = ""
    refuses: str = ""
    breaks: str = ""
    spoil: Callable[[dict[str, Tensor]], None] = lambda outputs: None
    launches: int = 0

    def absent(self) -> str:
        return self.missing

    def bind(self, problem: Problem) -> Bound:
        if self.refuses:
            raise Unsupported(self.refuses)
        stored: dict[str, Tensor] = {}

        def launch(way: int) -> None:
            self.launches += 1
            if self.breaks:
                raise RuntimeError(self.breaks)
            S, tokens = problem.initial.double(), Tokens.of(problem, problem.mixed, problem.a, problem.b)
            o, states = [], []
            for t in range(problem.shape.T):
                S, o_t = tokens.step(S, t)
                o.append(o_t)
                states.append(S)
            stored.update(o=torch.stack(o, 1).bfloat16(), states=torch.stack(states, 1).bfloat16(), final=S.bfloat16())
            self.spoil(stored)

        return Bound(launch, lambda: stored, stored.clear)
