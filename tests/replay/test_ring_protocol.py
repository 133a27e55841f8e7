"""Gate 5: what a server may do between verify and accept: repeat, flush, reset, and leave slots alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import replay
from kernels.replay import ring
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay.ring_cases import FOLDING, KEPT, LIVE, Server, same, split
from tests.verify.cases import relative_l2
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")

SPLITS = (None, 3)


def with_folds(device: torch.device, seed: int = 0, pool: torch.dtype = torch.bfloat16) -> Server:
    """Four slots: two that the next verify folds, one with a history alone, one with nothing."""
    server = Server(N=4, max_tokens=5, capacity=6, seed=seed, pool=pool, device=device)
    for accepted in ((5, 1, 4, 0), (3, 1, 5, 0)):
        server.step([5] * 4, accept=False)
        server.accept(accepted)
    w, x, y, z = (server.records[slot] for slot in server.slots)
    assert w.pending and y.pending and not x.pending and not z.pending
    assert len(w.history) and len(x.history) == 2 and not len(z.history)
    return server


def flush(server: Server, slots: Sequence[int]) -> None:
    options = {name: value for name, value in server.options.items() if name != "scale"}
    ring.flush(server.A_log, server.dt_bias, server.pool.view, server.indices(slots), server.window, **options)


@pytest.mark.criterion("5.31")
@pytest.mark.parametrize("ctas", SPLITS)
def test_a_repeated_verify(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `accept` the same call gives the same bits and folds nothing twice; one with other tokens counts as if the
    first had not been."""
    split(monkeypatch, ctas)
    server = with_folds(device)
    inputs = server.tokens(20)
    first = server.call([5] * 4, inputs)
    server.check(first, evidence)
    state = server.pool.view.clone()
    assert not same(state, first.before), "nothing was folded"
    for _ in range(2):
        again = server.call([5] * 4, inputs)
        server.check(again, evidence)  # no fold is pending any more, so that a state that changes is refused
        evidence.equal("outputs that differ in a repeated call", different(again.o.view, first.o.view), 0)
        evidence.equal("states that differ after a repeated call", different(server.pool.view, state), 0)
    lengths = [2, 0, 5, 3]
    server.step(lengths, evidence, accept=False)
    evidence.equal("states that differ after a call with other tokens", different(server.pool.view, state), 0)
    server.accept([1, 0, 5, 3])
    server.forget()
    for _ in range(3):
        server.step([5, 4, 1, 3], evidence)


@pytest.mark.criterion("5.31")
def test_a_verify_with_some_requests_is_repeated_with_all(device: torch.device, evidence: Evidence) -> None:
    """Slots that were folded in the first call stay as they are, the others are folded in the second."""
    server = with_folds(device)
    w, _, y, z = server.slots
    server.step([5, 0], evidence, accept=False, slots=[w, z])
    assert not server.records[w].pending and server.records[y].pending
    server.step([1, 2, 3, 4], evidence, accept=False)
    assert not server.records[y].pending
    server.accept([1, 0, 2, 4])
    server.step([5, 5, 5, 5], evidence)


@pytest.mark.criterion("5.31")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
def test_flush(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool holds all that was accepted, and nothing that was not; other slots, padding and the tokens of the ring
    stay as they are. A second flush changes nothing. Verify, commit and the ring go on from there."""
    if pool == torch.float32 and ctas:
        pytest.skip("one program of this dtype is enough")
    split(monkeypatch, ctas)
    server = with_folds(device, pool=pool)
    w, x, y, z = server.slots
    server.call([5, 4, 3, 2])  # new tokens that nobody accepted, and both folds
    for record in server.records.values():
        record.pending = False
    server.accept([4, 4, 0, 2])  # folds again in x, appends to y
    before, kept = server.pool.view.clone(), server.window
    others = {name: getattr(kept, name)[y].clone() for name in (*KEPT, "cursors", "marks")}
    flushed = [w, x, z]
    flush(server, [w, -1, x, z, len(server.pool.view)])
    for slot in flushed:
        record, state = server.records[slot], before[slot].double()
        if record.pending:
            state = server.exact(record.to_fold, state)[1][-1].to(pool).double()
        if len(record.history):
            state = server.exact(record.history, state)[1][-1]
        error = relative_l2(server.pool.view[slot], state)
        evidence.at_most(f"a flushed state in {str(pool)[6:]}, relative L2", error, ROUNDING[pool])
        assert kept.cursors[slot, FOLDING : LIVE + 1].tolist() == [0, 0]
    assert all(same(x, getattr(kept, name)[y]) for name, x in others.items()), "a slot that was not flushed changed"
    unchanged = [slot for slot in range(len(before)) if slot not in flushed]
    assert same(before[unchanged], server.pool.view[unchanged]) and server.pool.gaps_intact()
    state = server.pool.view.clone()
    flush(server, [z, w, x])
    evidence.equal("states that differ after a second flush", different(state, server.pool.view), 0)
    go_on(server, flushed, evidence)


def go_on(server: Server, flushed: Sequence[int], evidence: Evidence) -> None:
    """After a flush: verify and commit of kernels.replay on the pool alone, then steps of the ring."""
    slots, starts = server.indices(flushed), server.indices([0, 3, 3, 7])
    inputs, before = server.tokens(7), server.pool.view.clone()
    gates: dict[str, Any] = {"A_log": server.A_log, "a": inputs.a, "dt_bias": server.dt_bias, "b": inputs.b}
    given: dict[str, Any] = {"k": inputs.k, "v": inputs.v, "ssm_states": server.pool.view, "cache_indices": slots}
    o = replay.verify(**gates, **given, q=inputs.q, query_start_loc=starts)
    replay.commit(**gates, **given, query_start_loc=starts, accepted_lengths=server.indices([2, 0, 4]))
    for tokens, L, slot in ((slice(0, 3), 2, flushed[0]), (slice(3, 7), 4, flushed[2])):
        outputs, states = server.exact(inputs[tokens], before[slot])
        evidence.at_most("o of a verify after a flush", relative_l2(o[tokens], outputs), ROUNDING[torch.bfloat16])
        found, limit = server.pool.view[slot], ROUNDING[server.pool.view.dtype]
        evidence.at_most("a state committed after a flush", relative_l2(found, states[L - 1]), limit)
    for slot in flushed:
        record = server.records[slot]
        record.to_fold = record.history = inputs[:0]
        record.pending, record.folds = False, int(server.window.cursors[slot, 3])
    server.forget()
    for lengths in ([5, 5, 5, 5], [3, 0, 5, 4], [5, 2, 4, 1]):
        server.step(lengths, evidence, accept=False)
        server.accept(lengths)
        server.forget()
    assert all(server.records[slot].folds for slot in flushed)


@pytest.mark.criterion("5.31")
def test_flush_of_nothing(device: torch.device) -> None:
    """Slots with neither history nor fold, padding, and no slots at all."""
    server = Server(device=device)
    for slots in (server.slots, [-1, 99], []):
        flush(server, slots)
        assert not server.pool.differs().any() and not server.window.cursors[:, : LIVE + 1].any()


@pytest.mark.criterion("5.31")
@pytest.mark.parametrize("ctas", SPLITS)
def test_reset(ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that is due, a history, and one that a verify has just folded are forgotten; later folds are carried out.
    Padding is passed over, other slots go on."""
    split(monkeypatch, ctas)
    server = with_folds(device)
    w, x, y, z = server.slots
    before = {name: getattr(server.window, name).clone() for name in (*KEPT, "marks")}
    cursors, pool = server.window.cursors.clone(), server.pool.view.clone()
    ring.reset(server.window, server.indices([w, -1, x, len(cursors), 2**31 - 1, -(2**31)]))
    others = [slot for slot in range(len(cursors)) if slot not in (w, x)]
    assert same(cursors[others], server.window.cursors[others]) and same(pool, server.pool.view)
    assert all(same(value, getattr(server.window, name)) for name, value in before.items())
    for slot in (w, x):
        set_anew(server, slot)
    server.check_cursors()
    server.forget()
    server.step([5, 5, 5, 5], evidence, accept=False)
    server.accept([5, 0, 2, 4])
    server.step([5, 5, 5, 5], evidence, accept=False)
    server.accept([5, 5, 5, 5])  # w, y and z are to be folded
    assert server.records[w].pending and server.records[z].pending
    server.step([0, 1, 0, 2], evidence, accept=False)
    ring.reset(server.window, server.indices([w, y]))  # after the fold, before accept
    for slot in (w, y):
        set_anew(server, slot)
    server.check_cursors()
    for _ in range(3):
        server.step([5, 5, 5, 5], evidence, accept=False)
        server.accept([4, 5, 3, 5])
        server.forget()
    assert all(server.records[slot].folds for slot in server.slots)


def set_anew(server: Server, slot: int) -> None:
    """A prefill leaves another state in the slot, of which nothing is kept."""
    state: Tensor = server.normal(*server.pool.view.shape[1:], dtype=torch.float32)
    server.pool.view[slot] = state.to(server.pool.view.dtype)
    record = server.records[slot]
    record.to_fold, record.history, record.pending = record.history[:0], record.history[:0], False


@pytest.mark.criterion("5.31")
@pytest.mark.parametrize("padding", (-1, -(2**31), 4, 2**31 - 1))
@pytest.mark.parametrize("first", (False, True))
def test_reset_beside_padding(first: bool, padding: int, device: torch.device) -> None:
    """The first slot and the last are reset, whether padding comes before or after them."""
    server = Server(N=4, slots=4, max_tokens=3, capacity=6, device=device)
    for _ in range(3):
        server.call([3] * 4)
        server.accept([3] * 4)
    before = server.window.cursors.clone()
    ring.reset(server.window, server.indices([padding, 0, 3] if first else [3, 0, padding]))
    assert server.window.cursors[[0, 3], :3].tolist() == [[0, 0, 0]] * 2
    assert same(server.window.cursors[:, 3], before[:, 3]), "the number of folds changed"
    assert same(server.window.cursors[1:3], before[1:3]), "a slot that was not named changed"


@pytest.mark.criterion("5.31")
def test_reset_of_nothing(device: torch.device) -> None:
    server = with_folds(device)
    before = server.window.cursors.clone()
    for slots in ([], [-1], [-5, 99]):
        ring.reset(server.window, server.indices(slots))
        assert same(before, server.window.cursors)
    empty = ring.Window.allocate(server.pool.view[:0], 2)
    ring.reset(empty, server.indices([0, 1]))
    ring.accept(empty, server.indices([0, 1]), server.indices([1, 1]))


@pytest.mark.criterion("5.31")
@pytest.mark.parametrize("ctas", SPLITS)
def test_slots_take_turns(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go: each step has some of the slots in some order, and all bits of the others stay, with the
    folds that wait in them."""
    split(monkeypatch, ctas)
    server = Server(N=6, max_tokens=4, capacity=3, device=device)
    for _ in range(10):
        some = torch.randperm(6, generator=server.rng)[: 1 + int(torch.randint(4, (1,), generator=server.rng))]
        slots = [server.slots[n] for n in some.tolist()]
        before = {name: getattr(server.window, name).clone() for name in (*KEPT, "cursors", "marks")}
        lengths = torch.randint(5, (len(slots),), generator=server.rng).tolist()
        server.step(lengths, evidence, slots=slots)
        others = [slot for slot in range(len(server.pool.view)) if slot not in slots]
        for name, x in before.items():
            assert same(x[others], getattr(server.window, name)[others]), f"{name} of other slots changed"
    evidence.at_least("folds", server.folds, 6)


@pytest.mark.criterion("5.31")
def test_accepted_numbers_are_taken_as_the_nearest(device: torch.device, evidence: Evidence) -> None:
    """Below 0 as none, beyond the most tokens of a request as that."""
    server = Server(max_tokens=4, capacity=6, device=device)
    for given in ((-1, 9, 2), (2**31 - 1, -(2**31), 5), (4, 4, -7)):
        server.step([4] * 3, evidence, accept=False)
        server.accept([max(0, min(4, L)) for L in given], given)
        server.forget()
    server.step([4] * 3, evidence)
    evidence.at_least("folds", server.folds, 2)
