"""Gate 5: the cursors of a ring, over every sequence of lengths: what is read is what was accepted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

import reference.ring
from kernels.replay import contract, ring
from tests.gate_engine import Evidence
from tests.replay.ring_cases import Server, same

SIZES = [(max_tokens, capacity) for max_tokens in (1, 2, 3) for capacity in range(5)]


@dataclasses.dataclass(frozen=True)
class Slot:
    """A ring of token numbers, and what it has to hold: the tokens to fold and those of the history, in order."""

    cursors: tuple[int, int, int, int]
    mark: int
    rows: tuple[int, ...]  # the number of the token in each row, -1 before there is one
    to_fold: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    pending: bool = False  # whether a verify has still to fold
    tokens: int = 0  # numbers given so far

    def kind(self) -> tuple[object, ...]:
        """The same for two slots whose tokens differ in nothing but their numbers and whose folds in how many there
        were: whatever follows goes the same way. Rows whose tokens nobody may read count as one."""
        held = {token: i for i, token in enumerate(self.to_fold + self.history)}
        return self.cursors[:3], self.pending, len(self.to_fold), tuple(held.get(token, -1) for token in self.rows)


class Numbers:
    """The reference of verify on tokens that are numbers, which notes what it is given to compute with."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seen: list[list[int]] = []

    def recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor | None = None, *,
        scale: float | None = None, use_qk_l2norm: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert torch.equal(k.flatten(), v.flatten()) and torch.equal(g.flatten(), v.flatten())
        self.seen.append(v.flatten().int().tolist())
        return v, v[..., None]

    def verify(self, slots: Sequence[Slot], lengths: Sequence[int]) -> list[tuple[Slot, list[list[int]]]]:
        """Every slot with so many new tokens behind it; and what was computed with: tokens of a fold, of outputs."""
        found = []
        for slot, L in zip(slots, lengths, strict=True):
            kept = torch.tensor(slot.rows, dtype=torch.float32).view(1, -1, 1)
            buffers = kept[..., None].clone(), kept[..., None].clone(), kept.clone(), kept.clone()
            cursors = torch.tensor([slot.cursors], dtype=torch.int32)
            marks = torch.tensor([[[slot.mark]]], dtype=torch.int32)
            new = torch.arange(slot.tokens, slot.tokens + L, dtype=torch.float32).view(-1, 1)
            o, one = torch.empty(L, 1, 1), torch.zeros(1)
            self.seen = []
            reference.ring.verify(
                new[..., None], new[..., None], new[..., None], new, new, one, one, torch.zeros(1, 1, 1, 1),
                torch.zeros(1, dtype=torch.int32), torch.tensor([0, L]), o, buffers,
                cursors, marks, recurrence=self.recurrence, gates=lambda A, a, bias, b, neg: (a, b),
            )  # fmt: skip
            assert all(torch.equal(x.flatten(), buffers[0].flatten()) for x in buffers[1:])
            assert cursors.tolist() == [list(slot.cursors)], "a verify moved cursors"
            after = dataclasses.replace(
                slot, mark=int(marks), rows=tuple(buffers[0].flatten().int().tolist()), tokens=slot.tokens + L,
                pending=False,
            )  # fmt: skip
            found.append((after, self.seen))
        return found


def accept(slots: Sequence[Slot], accepted: Sequence[int], lengths: Sequence[int], window: ring.Window) -> list[Slot]:
    """Move the cursors of all slots by the public function, and what they have to hold as it is documented."""
    cursors = torch.tensor([slot.cursors for slot in slots], dtype=torch.int32).view(-1, 4)
    ring.accept(
        dataclasses.replace(window, cursors=cursors), torch.arange(len(slots), dtype=torch.int32),
        torch.tensor(accepted, dtype=torch.int32),
    )  # fmt: skip
    found = []
    for slot, moved, L, tokens in zip(slots, cursors.tolist(), accepted, lengths, strict=True):
        new = tuple(range(slot.tokens - tokens, slot.tokens - tokens + L))
        fits = len(slot.history) + L <= window.capacity
        to_fold, history = ((), slot.history + new) if fits else (slot.history, new)
        after = dataclasses.replace(
            slot, cursors=tuple(moved), to_fold=to_fold, history=history, pending=len(to_fold) > 0
        )
        found.append(after)
    return found


def window_of(max_tokens: int, capacity: int, slots: int = 1) -> ring.Window:
    return ring.Window.allocate(torch.zeros(slots, 1, 1, 1), 1, max_tokens=max_tokens, capacity=capacity)


def check_held(slot: Slot, rows: int) -> None:
    """From its first row on a slot has the tokens to fold and the history."""
    base, folding, live, _ = slot.cursors
    assert (folding, live) == (len(slot.to_fold), len(slot.history))
    held = tuple(slot.rows[(base + i) % rows] for i in range(folding + live))
    assert held == slot.to_fold + slot.history, f"rows {slot.rows} from {base}, should be {slot.to_fold, slot.history}"


@pytest.mark.criterion("5.30")
@pytest.mark.parametrize(("max_tokens", "capacity"), SIZES)
def test_every_sequence_of_lengths(max_tokens: int, capacity: int, evidence: Evidence) -> None:
    """All sequences of any length of verifies with 0 to max_tokens tokens, each accepted in part, or repeated with
    other tokens: slots of the same kind are followed once, until no new kind comes up.

    In each step a verify folds exactly the tokens that the accept before asked to fold, and computes outputs from the
    history and the new tokens, in order; afterwards the ring still has all that it has to hold.
    """
    window = window_of(max_tokens, capacity)
    rows = window.rows
    numbers = Numbers(rows)
    frontier = [Slot((0, 0, 0, 0), 0, (-1,) * rows)]
    kinds, transitions, folds = {frontier[0].kind()}, 0, 0
    while frontier:
        pairs = list(itertools.product(frontier, range(max_tokens + 1)))
        verified = numbers.verify([slot for slot, _ in pairs], [L for _, L in pairs])
        given: list[tuple[Slot, int, int]] = []
        following: list[Slot] = []
        for (slot, L), (after, seen) in zip(pairs, verified, strict=True):
            new = list(range(slot.tokens, slot.tokens + L))
            fold = [list(slot.to_fold)] if slot.pending else []
            assert seen == fold + ([[*slot.history, *new]] if L else [])
            check_held(after, rows)
            folds += slot.pending
            following.append(after)
            given += [(after, accepted, L) for accepted in range(L + 1)]
        moved = accept([x for x, _, _ in given], [x for _, x, _ in given], [x for _, _, x in given], window)
        for slot in moved:
            check_held(slot, rows)
        transitions += len(moved) + len(following)
        frontier = []
        for slot in following + moved:
            if slot.kind() not in kinds:
                kinds.add(slot.kind())
                frontier.append(slot)
    evidence.at_least("kinds of slots", len(kinds), rows)
    evidence.at_least("steps that were checked", transitions, len(kinds))
    evidence.at_least("folds", folds, 1)


@pytest.mark.criterion("5.30")
@pytest.mark.parametrize("max_tokens", (1, 2, 3))
def test_sequences_one_after_the_other(max_tokens: int, evidence: Evidence) -> None:
    """Six steps of every sequence in full, from the first on: folded and live tokens together are the accepted ones.

    The kinds above stand for sequences of any length; here nothing is left out, and nothing stands for anything.
    """
    steps = {1: 6, 2: 5, 3: 3}[max_tokens]
    choices = [(L, accepted) for L in range(max_tokens + 1) for accepted in range(L + 1)]
    window = window_of(max_tokens, max_tokens - 1)
    numbers = Numbers(window.rows)
    reached: list[tuple[Slot, tuple[int, ...], tuple[int, ...]]] = [
        (Slot((0, 0, 0, 0), 0, (-1,) * window.rows), (), ())
    ]
    for _ in range(steps):
        every = [(before, L) for before in reached for L in range(max_tokens + 1)]
        verified = numbers.verify([slot for (slot, _, _), _ in every], [L for _, L in every])
        given = []
        for ((slot, folded, taken), L), (after, seen) in zip(every, verified, strict=True):
            folded += tuple(seen[0]) if len(seen) > bool(L) else ()
            assert folded + after.history == taken, "folded and live tokens are not the accepted ones"
            for accepted in range(L + 1):
                given.append((after, folded, taken + tuple(range(slot.tokens, slot.tokens + accepted)), accepted, L))
        moved = accept([x[0] for x in given], [x[3] for x in given], [x[4] for x in given], window)
        reached = [(slot, folded, taken) for slot, (_, folded, taken, _, _) in zip(moved, given, strict=True)]
    evidence.equal("sequences", len(reached), len(choices) ** steps)


@pytest.mark.criterion("5.30")
@pytest.mark.parametrize("max_tokens", range(1, 17))
def test_rows_suffice(max_tokens: int, evidence: Evidence) -> None:
    """For every capacity: tokens to fold, history and new tokens never need more rows than a slot has."""
    for capacity in range(17):
        R = contract.window_rows(capacity, max_tokens)
        frontier, reached = {(0, 0)}, {(0, 0)}
        while frontier:
            moved = [list(state) for state in frontier]
            after = set()
            for accepted in range(max_tokens + 1):
                cursors = torch.tensor([[0, *state, 0] for state in moved], dtype=torch.int32)
                given = torch.full((len(moved),), accepted, dtype=torch.int32)
                slots = torch.arange(len(moved), dtype=torch.int32)
                reference.ring.accept(cursors, slots, given, rows=R, capacity=capacity, max_tokens=max_tokens)
                after |= {(folding, live) for _, folding, live, _ in cursors.tolist()}
            frontier = after - reached
            reached |= after
        most = max(folding + live for folding, live in reached) + max_tokens
        evidence.at_most("rows that are needed, of those that there are", most / R, 1.0)
        assert max(live for _, live in reached) <= max(capacity, max_tokens)


def states(rows: Iterable[int], capacity: int, max_tokens: int) -> Tensor:
    """Cursors of every first row, number of tokens to fold and of the history."""
    longest = range(max(capacity, max_tokens) + 1)
    each = itertools.product(rows, longest, longest)
    return torch.tensor([[*state, fold % 11] for fold, state in enumerate(each)], dtype=torch.int32)


def moved_by_the_reference(window: ring.Window, slots: Tensor, accepted: Tensor, capacity: int) -> Tensor:
    cursors = window.cursors.cpu().clone()
    reference.ring.accept(
        cursors, slots.cpu(), accepted.cpu(), rows=window.rows, capacity=capacity, max_tokens=window.max_tokens
    )
    return cursors


@pytest.mark.criterion("5.30")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("max_tokens", "capacity"), (*SIZES, (16, 16), (16, 0), (1, 16), (12, 7)))
def test_the_kernel_moves_them_as_the_reference(
    max_tokens: int, capacity: int, device: torch.device, evidence: Evidence
) -> None:
    """From every state and for every number of accepted tokens, one below 0 and two beyond the most included."""
    R = contract.window_rows(capacity, max_tokens)
    small = max(max_tokens, capacity) <= 4
    given = range(-1, max_tokens + 3, 1 if small else 3)
    bases = range(R) if small else (0, 1, R // 2, R - 2, R - 1)
    cursors = states(bases, capacity, max_tokens)
    window = window_of(max_tokens, capacity)
    wrong = 0
    for L in given:
        now = dataclasses.replace(window, cursors=cursors.clone().to(device))
        slots = torch.randperm(len(cursors), generator=torch.Generator().manual_seed(L + 1)).int().to(device)
        accepted = torch.full_like(slots, L)
        want = moved_by_the_reference(now, slots, accepted, capacity)
        ring.accept(now, slots, accepted)
        wrong += int((now.cursors.cpu() != want).sum())
    evidence.equal("cursors that differ from the reference's", wrong, 0)


@pytest.mark.criterion("5.30")
@pytest.mark.usefixtures("emulator")
def test_padding_and_slots_of_no_request_stay(device: torch.device, evidence: Evidence) -> None:
    """Padding is passed over; senseless numbers of tokens are taken as the nearest ones; other slots stay."""
    window = dataclasses.replace(window_of(4, 6, 5), cursors=states((3,), 6, 4)[:5].to(device))
    before = window.cursors.clone()
    slots = torch.tensor([3, -1, 5, 2**31 - 1, -(2**31), 1], dtype=torch.int32, device=device)
    accepted = torch.tensor([2**31 - 1, 3, 3, 3, 3, -(2**31)], dtype=torch.int32, device=device)
    want = moved_by_the_reference(window, slots, accepted, 6)
    ring.accept(window, slots, accepted)
    evidence.equal("cursors that differ from the reference's", int((window.cursors.cpu() != want).sum()), 0)
    others = [0, 2, 4]
    assert same(window.cursors[others], before[others]) and not same(window.cursors, before)
    for empty in (slots[:0], slots[1:2]):
        before = window.cursors.clone()
        ring.accept(window, empty, accepted[: len(empty)])
        assert same(window.cursors, before)


@pytest.mark.criterion("5.30")
def test_a_sequence_by_hand(evidence: Evidence) -> None:
    """Cursors, and the record of tests/replay/ring_cases.py by which the other tests of the ring judge."""
    server = Server(N=1, max_tokens=3, capacity=4, K=2, V=2, H=1, HV=1)
    (slot,) = server.slots
    found = []
    for accepted in (3, 1, 0, 1, 3, 3, 0, 2, 1, 1, 1):
        server.call([3])
        server.accept([accepted])
        found.append(server.window.cursors[slot].tolist())
    by_hand = (
        (0, 0, 3, 0), (0, 0, 4, 0), (0, 0, 4, 0), (0, 4, 1, 1), (4, 0, 4, 1), (4, 4, 3, 2), (8, 0, 3, 2), (8, 3, 2, 3),
        (0, 0, 3, 3), (0, 0, 4, 3), (0, 4, 1, 4),
    )  # fmt: skip
    evidence.equal("first row, tokens to fold, history, folds", found, [list(row) for row in by_hand])
