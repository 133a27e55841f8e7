"""Is an output right? Relative L2 error against the fp64 recurrence, before anything is timed."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from reference.gating import gates, l2norm
from reference.recurrence import delta_step, per_value_head
from tests.bench.implementation import Bound
from tests.bench.problem import FULL_HISTORY, RING_OPS, SCALE, Problem
from tests.limits import ROUNDING

#: An output of a peer that is further from fp64 than this is wrong, not imprecise: three times the rounding of bf16
#: (1.7e-3 root mean square), which leaves room for bf16 arithmetic inside.
PEER_LIMIT = 5e-3


class Error:
    """Accumulates ||x - y|| / ||y|| over parts; x in any dtype, y in fp64."""

    def __init__(self) -> None:
        self.difference = self.norm = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        self.difference += float((x.double() - y).square().sum())
        self.norm += float(y.square().sum())

    @property
    def value(self) -> float:
        """inf if an element was not finite."""
        error = (self.difference / max(self.norm, 1e-300)) ** 0.5
        return error if error == error else float("inf")


@dataclasses.dataclass
class Tokens:
    """One call's tokens in fp64, ready for the recurrence: q, k, v [N, T, HV, dim]; g, beta [N, T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def of(cls, problem: Problem, mixed: Tensor, a: Tensor, b: Tensor) -> Tokens:
        N, HV = problem.shape.N, problem.shape.HV
        q, k, v = problem.split(mixed)
        q, k = (per_value_head(l2norm(x.double()), HV) for x in (q, k))
        g, beta = gates(problem.A_log.double(), a.double(), problem.dt_bias.double(), b.double())
        return cls(*(x.double().unflatten(0, (N, -1)) for x in (q * SCALE, k, v, g, beta)))

    def step(self, S: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return delta_step(S, self.q[:, t], self.k[:, t], self.v[:, t], self.g[:, t], self.beta[:, t])


def errors(problem: Problem, outputs: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of each output (see Bound) of way 0 against the recurrence in fp64, a token at a time."""
    shape = problem.shape
    found = {name: Error() for name in outputs}
    S = problem.initial.double()
    if shape.op in RING_OPS:
        past = Tokens.of(problem, problem.past_mixed, problem.past_a, problem.past_b)
        for t in range(int(problem.history.max())):
            S = torch.where((t < problem.history)[:, None, None, None], past.step(S, t)[0], S)
        if "final" in outputs:
            folded = problem.history == FULL_HISTORY
            found["final"].add(outputs["final"][folded], S[folded])
    tokens = Tokens.of(problem, problem.mixed, problem.a, problem.b)
    last = problem.lengths if shape.op == "commit" else torch.full_like(problem.lengths, shape.T)
    for t in range(shape.T):
        S, o = tokens.step(S, t)
        if "o" in outputs:
            found["o"].add(outputs["o"][:, t], o)
        if "states" in outputs:
            found["states"].add(outputs["states"][:, t], S)
        if "final" in outputs and shape.op not in RING_OPS:
            found["final"].add(outputs["final"][last == t + 1], S[last == t + 1])
    return {name: error.value for name, error in found.items()}


def run_and_compare(problem: Problem, bound: Bound) -> dict[str, float]:
    """One launch on poisoned outputs, and its errors."""
    bound.reset()
    bound.launch(0)
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return errors(problem, bound.outputs())


def allowed(impl: str, dtype: torch.dtype, T: int) -> float:
    """The largest error of an output in `dtype`, which only matters for ours: the rounding of what is stored.

    Once, or T + 1 independent times where the state is rounded after every token (gate 3, criterion 3.31).
    """
    if not is_ours(impl):
        return PEER_LIMIT
    return ROUNDING[dtype] * (math.sqrt(T + 1) if impl.endswith("-lossless") else 1.0)


def is_ours(impl: str) -> bool:
    return impl.startswith("kernels/")


def verdict(found: dict[str, float], dtypes: dict[str, torch.dtype], impl: str, T: int) -> str:
    """ "" if every error of `impl` on T tokens is within its limit, else what is wrong."""
    if not found:
        return "wrong: no output was compared"
    for name, error in found.items():
        limit = allowed(impl, dtypes.get(name, torch.float32), T)
        if not error <= limit:
            return f"wrong: relative L2 error of {name} is {error:.2g}, limit {limit:.2g}"
    return ""
