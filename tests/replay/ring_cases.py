"""A server that steps through verify and accept: guarded buffers, what the ring has to hold, and fp64 behind it.

The record of a slot is what the documentation says that a ring holds, kept in Python lists: tokens that the next verify
folds, and the history behind them. Every step is compared with fp64 for itself: a folded state with the recurrence from
the slot as it was before, outputs with the recurrence from the slot as it is after the call, over the history and the
new tokens. So each comparison sees one rounding, however many steps there were before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.replay import ring
from reference.gating import gates
from reference.recurrence import recurrent
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay.cases import split as limit_ctas
from tests.verify.cases import GUARD, Buffer, relative_l2

#: what the limits of tests/limits.py leave for arithmetic: a fifth of the rounding
OVER_ROUNDING = 1.2
#: of a slot's cursors
BASE, FOLDING, LIVE, FOLD = range(4)
#: tokens of a window, by its attributes and those of a call
KEPT = ("k", "v", "a", "b")


@dataclasses.dataclass
class Tokens:
    """Inputs of one call, or what is kept of some of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def __getitem__(self, which: slice) -> Tokens:
        return Tokens(*(getattr(self, field.name)[which] for field in dataclasses.fields(self)))

    def __len__(self) -> int:
        return len(self.v)

    def __add__(self, other: Tokens) -> Tokens:
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self))
        return Tokens(*(torch.cat(pair) for pair in pairs))


@dataclasses.dataclass
class Record:
    """What the ring holds of a slot."""

    to_fold: Tokens
    history: Tokens
    pending: bool = False  # whether `to_fold` is still to be folded
    folds: int = 0  # asked for so far


@dataclasses.dataclass
class Call:
    """A verify and what it found and left: the new tokens of each request are inputs[starts[n] : starts[n + 1]]."""

    slots: list[int]
    starts: list[int]
    inputs: Tokens
    o: Buffer
    before: Tensor  # the pool ahead of the call
    cursors: Tensor
    kept: dict[str, Tensor]  # the window's tokens ahead of the call
    marks: Tensor

    def of(self, n: int) -> slice:
        return slice(self.starts[n], self.starts[n + 1])


class Server:
    """A pool of states with its window; its `step` and `accept` call the public functions and check what they left."""

    def __init__(
        self,
        N: int = 3,
        max_tokens: int = 4,
        *,
        capacity: int = 16,
        H: int = 2,
        HV: int = 4,
        K: int = 128,
        V: int = 128,
        slots: int | None = None,
        pool: torch.dtype = torch.bfloat16,
        gate: torch.dtype = torch.bfloat16,
        bias: torch.dtype = torch.float32,
        pitched: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """N requests in a pool of `slots`. Gates: heads from those that forget at once to those that keep everything.

        The rows of the window are NaN, so that a row that nobody has written shows wherever it is used.
        """
        self.rng = torch.Generator().manual_seed(seed)
        self.device, self.options, self.pitched, self.gate = torch.device(device), options, pitched, gate
        self.H, self.HV, self.K, self.V = H, HV, K, V
        slots = slots or N + 2
        state = (self.normal(slots, HV, V, K, dtype=torch.float32) * 0.5).to(pool)
        self.pool = Buffer.make(state, (16,) if pitched else ())
        decay = torch.linspace(-5.0, 1.5, HV)[torch.randperm(HV, generator=self.rng)]
        self.A_log, self.dt_bias = decay.to(self.device), self.normal(HV, dtype=bias)
        self.window = ring.Window.allocate(self.pool.view, H, max_tokens=max_tokens, capacity=capacity, gate_dtype=gate)
        for name in KEPT:
            getattr(self.window, name).fill_(torch.nan)
        self.slots = torch.randperm(slots, generator=self.rng)[:N].tolist()
        none = self.tokens(0)
        self.records = {slot: Record(none, none) for slot in range(slots)}
        self.last: Call | None = None
        self.wrapped = 0  # requests of a verify whose new tokens went past the last row of the ring

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=self.rng).to(dtype).to(self.device)

    def tokens(self, NT: int) -> Tokens:
        """Random inputs: q, k, v are views of one mixed row, which has a gap if `pitched`, and a, b of another."""
        H, HV, K, V = self.H, self.HV, self.K, self.V
        mixed = self.normal(NT, 2 * H * K + HV * V + (8 if self.pitched else 0))
        q, k, v = (
            mixed[:, start : start + heads * dim].view(NT, heads, dim)
            for start, heads, dim in ((0, H, K), (H * K, H, K), (2 * H * K, HV, V))
        )
        if not self.options.get("use_qk_l2norm_in_kernel", True):
            k.mul_(1 / 16)  # near unit length, else the recurrence explodes
        ba = self.normal(NT, HV, 2, dtype=self.gate)
        a, b = (ba[..., i] if self.pitched else ba[..., i].contiguous() for i in range(2))
        return Tokens(q, k, v, a, b)

    def lengths(self, least: int = 0) -> list[int]:
        """Of every request a random number of new tokens."""
        return torch.randint(least, self.window.max_tokens + 1, (len(self.slots),), generator=self.rng).tolist()

    def some_of(self, lengths: Sequence[int]) -> list[int]:
        """Random numbers of accepted tokens; all and none are as likely as all the others together."""
        kinds = torch.randint(4, (len(lengths),), generator=self.rng).tolist()
        return [
            {0: 0, 1: L}.get(kind, int(torch.randint(L + 1, (1,), generator=self.rng)))
            for kind, L in zip(kinds, lengths, strict=True)
        ]

    def indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def is_slot(self, slot: int) -> bool:
        return 0 <= slot < len(self.pool.view)

    # the calls

    def call(
        self, lengths: Sequence[int], inputs: Tokens | None = None, slots: Sequence[int] | None = None, tail: int = 0
    ) -> Call:
        """Verify, of `slots` (those of all requests) `lengths` new tokens each and `tail` of no request; no check."""
        slots = self.slots if slots is None else list(slots)
        starts = [0, *itertools.accumulate(lengths)]
        inputs = self.tokens(starts[-1] + tail) if inputs is None else inputs
        unset = torch.full(inputs.v.shape, torch.nan, dtype=inputs.v.dtype, device=self.device)
        o = Buffer.make(unset, (8,) if self.pitched else ())
        kept = {name: getattr(self.window, name).clone() for name in KEPT}
        found = (self.pool.view.clone(), self.window.cursors.clone(), kept, self.window.marks.clone())
        returned = ring.verify(
            self.A_log, inputs.a, self.dt_bias, inputs.q, inputs.k, inputs.v, inputs.b, self.pool.view,
            self.indices(slots), self.indices(starts), self.window, o=o.view, **self.options,
        )  # fmt: skip
        assert returned is o.view
        self.last = Call(slots, starts, inputs, o, *found)
        return self.last

    def step(
        self, lengths: Sequence[int], evidence: Evidence | None = None, accept: bool = True, **options: Any
    ) -> Call:
        """A verify that is checked, and an accept of random numbers of tokens."""
        call = self.call(lengths, **options)
        self.check(call, Evidence() if evidence is None else evidence)
        if accept:
            self.accept(self.some_of(lengths))
        return call

    def accept(self, accepted: Sequence[int], given: Sequence[int] | None = None) -> None:
        """Accept so many tokens of each request of the last verify (`given`: what the function is told instead)."""
        call = self.last
        assert call is not None
        ring.accept(self.window, self.indices(call.slots), self.indices(accepted if given is None else given))
        for n, (slot, L) in enumerate(zip(call.slots, accepted, strict=True)):
            if self.is_slot(slot):
                self.record(slot, call.inputs[call.of(n)][:L])
        self.check_cursors()

    def record(self, slot: int, accepted: Tokens) -> None:
        """Move a record as the documentation has it."""
        record = self.records[slot]
        none = accepted[:0]
        if len(record.history) + len(accepted) <= self.window.capacity:
            record.to_fold, record.history, record.pending = none, record.history + accepted, False
        else:
            record.to_fold, record.history = record.history, accepted
            record.pending = len(record.to_fold) > 0
            record.folds += 1

    def forget(self) -> None:
        """NaN in every row of the ring that holds no token that was accepted: of rejected ones nothing may be used."""
        rows = torch.arange(self.window.rows, device=self.device)
        for slot, (base, folding, live, _) in enumerate(self.window.cursors.tolist()):
            unused = (rows - base) % self.window.rows >= folding + live
            for name in KEPT:
                getattr(self.window, name)[slot, unused] = torch.nan

    # the checks

    def exact(self, tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """fp64: outputs of `tokens` and the states after each of them, from `state`."""
        q, k, v, a, b = (getattr(tokens, field.name).double() for field in dataclasses.fields(tokens))
        negative = self.options.get("allow_neg_eigval", False)
        g, beta = gates(self.A_log.double(), a, self.dt_bias.double(), b, negative)
        return recurrent(
            q, k, v, g, beta, state.double(), scale=self.options.get("scale"),
            use_qk_l2norm=self.options.get("use_qk_l2norm_in_kernel", True),
        )  # fmt: skip

    def check(self, call: Call, evidence: Evidence) -> None:
        """Compare what a verify left with fp64, and all that it must not change with what it was."""
        dtype = self.pool.view.dtype
        assert not call.o.view[call.starts[-1] :].any(), "output rows of no request are not zero"
        changed = self.same_but(call.before, self.pool.view)
        outputs: list[tuple[Tensor, Tensor]] = []
        for n, slot in enumerate(call.slots):
            found = call.o.view[call.of(n)]
            if not self.is_slot(slot):
                assert not found.any(), "a padded request has outputs"
                continue
            record = self.records[slot]
            if record.pending:
                state = self.exact(record.to_fold, call.before[slot])[1][-1]
                error = relative_l2(self.pool.view[slot], state)
                evidence.at_most(f"a folded state in {str(dtype)[6:]}, relative L2", error, ROUNDING[dtype])
                record.pending = False
            else:
                assert slot not in changed, "a state changed that nobody asked to fold"
            new = call.inputs[call.of(n)]
            if len(new):
                o = self.exact(record.history + new, self.pool.view[slot])[0][len(record.history) :]
                outputs.append((found, o))
        self.check_outputs(outputs, evidence)
        others = set(changed) - set(call.slots)
        assert not others, f"slots of no request changed: {others}"
        self.check_kept(call)

    @staticmethod
    def check_outputs(outputs: Sequence[tuple[Tensor, Tensor]], evidence: Evidence) -> None:
        """Of each request against the rounding of its own fp64 values: a token has few of them, and one head may be
        most of their norm, so that the mean rounding says little. Of all requests together, if many, as elsewhere."""
        for found, o in outputs:
            if not o.any():
                assert not found.any(), "outputs that are zero in fp64 are not"
                continue
            ratio = relative_l2(found, o) / relative_l2(o.to(found.dtype), o)
            evidence.at_most("o of a request: its error over that of fp64, rounded", ratio, OVER_ROUNDING)
        if sum(o.numel() for _, o in outputs) >= 4096:
            found, o = (torch.cat(x) for x in zip(*outputs, strict=True))
            if o.any():
                evidence.at_most("o, relative L2 against fp64", relative_l2(found, o), ROUNDING[torch.bfloat16])

    @staticmethod
    def same_but(old: Tensor, new: Tensor) -> list[int]:
        """Where the first index differs in any bit."""
        return [i for i, (x, y) in enumerate(zip(old, new, strict=True)) if not same(x, y)]

    def check_kept(self, call: Call) -> None:
        """The ring: only rows behind the history changed, to the new tokens; neither cursors nor guards did."""
        R = self.window.rows
        assert same(call.cursors, self.window.cursors), "a verify moved cursors"
        expected = {name: call.kept[name].clone() for name in KEPT}
        for n, slot in enumerate(call.slots):
            tokens = call.of(n)
            if not self.is_slot(slot):
                continue
            base, folding, live, _ = call.cursors[slot].tolist()
            first = base + folding + live
            rows = [(first + i) % R for i in range(tokens.stop - tokens.start)]
            self.wrapped += rows != sorted(rows)
            for name in KEPT:
                expected[name][slot, rows] = getattr(call.inputs, name)[tokens]
        for name in KEPT:
            assert same(expected[name], getattr(self.window, name)), f"rows of {name} are not those of the new tokens"
        unmarked = [slot for slot in range(len(self.pool.view)) if slot not in call.slots]
        assert same(call.marks[unmarked], self.window.marks[unmarked]), "marks of no request changed"
        assert self.pool.gaps_intact() and call.o.gaps_intact(), "bytes outside a view changed"

    def check_cursors(self) -> None:
        """Cursors of all slots say what the records do."""
        for slot, (base, *found) in enumerate(self.window.cursors.tolist()):
            record = self.records[slot]
            assert 0 <= base < self.window.rows
            assert found == [len(record.to_fold), len(record.history), record.folds], f"cursors of slot {slot}"

    @property
    def folds(self) -> int:
        """Folds of any slot that were asked for."""
        return sum(record.folds for record in self.records.values())

    def made(self) -> Tensor:
        """The pool as it was made."""
        return self.pool.before.as_strided(self.pool.view.shape, self.pool.view.stride(), GUARD)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether all bits are equal, those of NaN included."""
    return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def split(monkeypatch: pytest.MonkeyPatch, ctas: int | None) -> None:
    """Calls run a program that starts at most so many CTAs; as `tests.replay.cases.split` does for verify."""
    limit_ctas(monkeypatch, ctas, ring, "window_plan")
