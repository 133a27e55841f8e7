"""One verify batch with every feature of the pool contract, and what it must leave behind.

The expectation is made here from the chunk form and from arbitrary-precision gates, one request at a time, with no
code of reference.pool or reference.gating.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from reference.chunk import chunked
from tests.reference import exact
from tests.reference.cases import rel_l2

Raw = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
POISON = 777.0  # in every place that must not be written


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Options of a batch; `build` makes it. fp64 buffers show unrounded results."""

    commit: bool = False
    snapshots: bool = True
    neg_eigval: bool = False
    norm: bool = True
    scale: float | None = None
    extreme_gates: bool = False
    tiny: bool = False
    D: int = 6
    K: int = 24
    V: int = 24
    pool_dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{name}={getattr(self, name)}" for name in changed) or "plain"


@dataclasses.dataclass
class Buffers:
    """Everything a call may write, with the memory around it."""

    pool_storage: Tensor
    o: Tensor
    snapshots: Tensor | None

    def clone(self) -> Buffers:
        snapshots = None if self.snapshots is None else self.snapshots.clone()
        return Buffers(self.pool_storage.clone(), self.o.clone(), snapshots)


class Batch:
    """Six requests: long, empty, padded (with NaN), short, a second one on the first one's slot, one token."""

    H, HV, SLOTS, ROWS = 2, 4, 5, 8
    lengths = (7, 0, 4, 3, 5, 1)
    slots = (3, 1, -1, 0, 3, 4)
    rows = (5, 0, 7, 2, 6, 1, 3, 4)  # longer than the number of requests
    TAIL = 3  # tokens beyond cu_seqlens[-1]

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = s = scenario
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        NT = sum(self.lengths) + self.TAIL
        size = (1e-3 if s.tiny else 1.0) * s.K**-0.5
        self.q, self.k = size * normal(NT, self.H, s.K), size * normal(NT, self.H, s.K)
        self.v, self.a, self.b = normal(NT, self.HV, s.V), normal(NT, self.HV), normal(NT, self.HV)
        self.A_log, self.dt_bias = -2 + normal(self.HV), normal(self.HV)
        if s.extreme_gates:
            self.A_log[0], self.dt_bias[0] = -8.0, 800.0  # exp(x) overflows, the decay is about 0.76
            self.A_log[1], self.dt_bias[1] = 1000.0, -1000.0  # exp(A_log) overflows, exp(x) underflows
        self.cu_seqlens = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0)], dtype=torch.int32)
        self.state_indices = torch.tensor(self.slots, dtype=torch.int32)
        self.intermediate_indices = torch.tensor(self.rows, dtype=torch.int32)
        for n, slot in enumerate(self.slots):
            if slot < 0:
                for x in (self.q, self.k, self.v, self.a, self.b):
                    x[self.tokens(n)] = torch.nan

        states = normal(self.SLOTS, self.HV, s.V, s.K).to(s.pool_dtype)
        storage = torch.full((self.SLOTS, states[0].numel() + 40), POISON, dtype=s.pool_dtype)
        shape = (self.ROWS, s.D, self.HV, s.V, s.K)
        snapshots = torch.full(shape, POISON, dtype=s.pool_dtype) if s.snapshots else None
        o = torch.full((NT, self.HV, s.V), POISON, dtype=torch.float64)
        self.before = Buffers(storage, o, snapshots)
        self.pool(storage).copy_(states)

    def raw(self, tokens: slice, dtype: torch.dtype = torch.float64) -> Raw:
        """(q, k, v, a, b) of some tokens, rounded to `dtype`."""
        q, k, v, a, b = (x[tokens].to(dtype) for x in (self.q, self.k, self.v, self.a, self.b))
        return q, k, v, a, b

    def tokens(self, n: int) -> slice:
        return slice(int(self.cu_seqlens[n]), int(self.cu_seqlens[n + 1]))

    def pool(self, storage: Tensor) -> Tensor:
        """The pool [slots, HV, V, K] in storage whose slots lie further apart than their size."""
        s = self.scenario
        return storage[:, : self.HV * s.V * s.K].unflatten(1, (self.HV, s.V, s.K))

    def run(self, verify: Callable[..., None]) -> Buffers:
        """The buffers after one call of a function with verify_gated_fwd's signature, in fp64."""
        s, after = self.scenario, self.before.clone()
        verify(
            *self.raw(slice(None)),
            self.A_log,
            self.dt_bias,
            self.pool(after.pool_storage),
            self.state_indices,
            self.cu_seqlens,
            after.o,
            after.snapshots,
            self.intermediate_indices,
            scale=s.scale,
            use_qk_l2norm_in_kernel=s.norm,
            allow_neg_eigval=s.neg_eigval,
            commit=s.commit,
            dtype=torch.float64,
        )
        return after

    def expected(self) -> Buffers:
        s, after = self.scenario, self.before.clone()
        after.o.zero_()
        before, pool = self.pool(self.before.pool_storage), self.pool(after.pool_storage)
        for n, slot in enumerate(self.slots):
            tokens = self.tokens(n)
            length = self.lengths[n]
            if slot < 0 or length == 0:
                continue
            g, beta = exact.gates(self.A_log, self.a[tokens], self.dt_bias, self.b[tokens], s.neg_eigval)
            o, states = chunked(
                self.q[tokens],
                self.k[tokens],
                self.v[tokens],
                g,
                beta,
                before[slot].double(),
                scale=s.scale,
                use_qk_l2norm=s.norm,
                chunk_size=4,
            )
            after.o[tokens] = o
            for t in range(min(length, s.D)):
                if after.snapshots is not None:
                    after.snapshots[self.rows[n], t] = states[t].to(s.pool_dtype)
            if s.commit:
                pool[slot] = states[-1].to(s.pool_dtype)
        return after


@functools.cache
def batch_and_expectation(scenario: Scenario) -> tuple[Batch, Buffers]:
    """For tests that leave both as they are."""
    batch = Batch(scenario)
    return batch, batch.expected()


def deviation(after: Buffers, expected: Buffers) -> float:
    """The largest relative L2 error over the buffers; inf where memory differs that had to stay as it was."""
    errors = [rel_l2(after.o, expected.o)]
    for x, y in ((after.pool_storage, expected.pool_storage), (after.snapshots, expected.snapshots)):
        if x is None or y is None:
            continue
        kept = y == POISON
        if not torch.equal(x[kept], y[kept]):
            return float("inf")
        errors.append(rel_l2(x[~kept], y[~kept]))
    return max(errors)


SCENARIOS = [
    Scenario(),
    Scenario(V=40),
    Scenario(commit=True),
    Scenario(commit=True, snapshots=False, D=1),
    Scenario(D=12, neg_eigval=True),
    Scenario(extreme_gates=True, commit=True),
    Scenario(scale=0.0),
    Scenario(scale=0.37, norm=False, V=8),
    Scenario(tiny=True),
]
