"""Gate 5: verify behind a ring of accepted tokens against fp64, over many steps with random acceptance, on the emulator
or the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gate_engine import Evidence
from tests.launch import watch
from tests.replay.ring_cases import KEPT, Server, Tokens, same, split
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
#: most CTAs of a program: those of the plan, which give few requests the smaller tile; fewer than there is work
SPLITS = (None, 3)
#: programs beyond the one of most tests: value heads of a key head, V, dtypes of the gates, no norm
HEADS: tuple[dict[str, Any], ...] = (
    {"H": 1, "HV": 3, "V": 64, "gate": torch.float32, "bias": torch.bfloat16},
    {"H": 1, "HV": 2, "V": 256, "use_qk_l2norm_in_kernel": False},
)


def steps(server: Server, count: int, evidence: Evidence, least: int = 0, **options: Any) -> Server:
    """Random numbers of new and of accepted tokens; what was rejected is forgotten."""
    for _ in range(count):
        server.step(server.lengths(least), evidence, **options)
        server.forget()
    return server


@pytest.mark.criterion("5.29")
@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("ctas", SPLITS)
def test_every_number_of_tokens(
    ctas: int | None, T: int, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of T tokens whose history grows by all of them, by one of them, and at random."""
    split(monkeypatch, ctas)
    server = Server(max_tokens=T, capacity=T, seed=T, device=device)
    for accepted in ([T, 1, 0], [T, 1, T // 2], [T, 1, T]):
        server.step([T] * 3, evidence, accept=False)
        server.accept(accepted)
        server.forget()
    steps(server, 2, evidence, least=1)
    evidence.at_least("folds", server.folds, 1)


@pytest.mark.criterion("5.29")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("capacity", (0, 1, 5, 16))
def test_capacities(
    capacity: int, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to none, where what was accepted is folded in the next verify or the one after; rows are used again."""
    split(monkeypatch, ctas)
    server = steps(Server(max_tokens=3, capacity=capacity, seed=capacity, device=device), 8, evidence)
    while server.wrapped < 2:
        server.step([3] * 3, evidence, accept=False)
        server.accept([3, 2, 3])
    evidence.at_least("folds", server.folds, 2)


@pytest.mark.criterion("5.29")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize(("capacity", "max_tokens"), ((16, 16), (2, 16), (16, 1)))
def test_largest_windows(
    capacity: int, max_tokens: int, ctas: int | None, device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """16 tokens to fold, 16 of history and 16 new ones; more accepted than the capacity; decode, 16 tokens a fold."""
    split(monkeypatch, ctas)
    server = Server(N=2, max_tokens=max_tokens, capacity=capacity, device=device)
    taken = [max_tokens, max_tokens]
    for _ in range(4 if max_tokens > 1 else 36):
        server.step(taken, evidence, accept=False)
        server.accept(taken)
        server.forget()
    evidence.equal("folds of a request", server.folds / 2, {(16, 16): 3, (2, 16): 4, (16, 1): 2}[capacity, max_tokens])
    assert all(len(server.records[slot].to_fold) in (0, 16) for slot in server.slots)


@pytest.mark.criterion("5.29")
@pytest.mark.parametrize("pool", POOLS[1:], ids=str)
def test_pool_dtypes(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """Both tiles: two requests, and as many as have more small pieces of work than there are CTAs."""
    steps(Server(max_tokens=7, capacity=8, pool=pool, device=device), 6, evidence, tail=1)
    server = steps(Server(N=18, max_tokens=2, capacity=1, pool=pool, seed=1, device=device), 4, evidence, least=1)
    evidence.at_least("folds", server.folds, 12)


@pytest.mark.criterion("5.29")
def test_many_requests(device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many on three CTAs that they are dealt out in two blocks, some with a fold and some without, in any order."""
    split(monkeypatch, 3)
    server = Server(N=101, max_tokens=2, capacity=1, device=device)
    for step in range(3):
        server.step([1] * 101, evidence, accept=False, tail=step % 2)
        server.accept([(slot * 7 + step) % 3 > 0 for slot in server.slots])
        order = torch.randperm(101, generator=server.rng).tolist()
        server.slots = [server.slots[n] for n in order]
    evidence.at_least("folds", server.folds, 50)


@pytest.mark.criterion("5.29")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("of", ("state", "values", "history"))
def test_each_term_alone(
    of: str, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """o is a sum of what the state, the values of the history and the new values give; none hides behind the others."""
    split(monkeypatch, ctas)
    server = Server(max_tokens=6, capacity=8, seed=3, device=device)
    server.A_log.fill_(-5.0)  # nothing is forgotten
    if of != "state":
        server.pool.view.zero_()
    for step in range(4):
        inputs = server.tokens(18)
        if of == "state" or (of == "history" and step == 3):
            inputs.v.zero_()
        server.step([6] * 3, evidence, accept=False, inputs=inputs)
        server.accept([6, 4, 2])
    evidence.at_least("folds", server.folds, 3)


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("ctas", SPLITS)
def test_ragged_with_padding(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without tokens, some that fold nevertheless; padding (-1, or an index beyond the pool) with NaN in its
    tokens, as in those of no request and in every slot and row that is not used; other requests in every step."""
    split(monkeypatch, ctas)
    server = Server(N=4, slots=7, max_tokens=5, capacity=4, device=device)
    unused = [slot for slot in range(7) if slot not in server.slots]
    server.pool.view[unused] = torch.nan
    w, x, y, z = server.slots
    rounds: tuple[tuple[list[int], list[int]], ...] = (
        ([w, -1, x, y, 7], [5, 3, 4, 0, 5]),
        ([y, x, w, 2**31 - 1], [5, 1, 3, 2]),
        ([-(2**31), x, y, z, w], [1, 0, 5, 5, 0]),
        ([-1, w, z, x], [5, 5, 0, 5]),
        ([z, y, x, w, -1], [0, 4, 0, 1, 0]),
    )
    for slots, lengths in rounds:
        inputs = server.tokens(sum(lengths) + 3)
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            if not server.is_slot(slot):
                for name in ("q", *KEPT):
                    getattr(inputs, name)[start : start + length] = torch.nan
            start += length
        for name in ("q", *KEPT):
            getattr(inputs, name)[start:] = torch.nan
        server.step(lengths, evidence, accept=False, slots=slots, inputs=inputs)
        server.accept(
            [max(0, L - (slot == x)) if server.is_slot(slot) else L for slot, L in zip(slots, lengths, strict=True)]
        )
        server.forget()
    evidence.at_least("folds", server.folds, 5)


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("tail", (0, 2))
def test_nothing_to_do(tail: int, device: torch.device) -> None:
    """No requests, no tokens, no slots: o is zero and everything else stays as it is."""
    server = Server(N=2, device=device)
    server.step([4, 4])
    kept = {name: getattr(server.window, name).clone() for name in (*KEPT, "cursors", "marks")}
    for slots, lengths in (([], []), ([-1, 9], [3, 1])):
        call = server.call(lengths, slots=slots, tail=tail)
        assert not call.o.view.any() and call.o.gaps_intact() and not server.pool.differs().any()
        server.accept(lengths)
        assert all(same(x, getattr(server.window, name)) for name, x in kept.items())


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("options", HEADS, ids=("HV = 3 H, V = 64, fp32 gates", "V = 256, no norm"))
def test_heads_and_gates(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    """In both tiles."""
    steps(Server(max_tokens=9, capacity=12, device=device, **options), 6, evidence)
    many = 264 // (options["HV"] * options["V"] // 32) + 1
    server = steps(Server(N=many, max_tokens=2, capacity=1, seed=1, device=device, **options), 3, evidence, least=1)
    evidence.at_least("folds", server.folds, many // 2)


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("options", ({"scale": 0.0}, {"scale": 2.5}, {"allow_neg_eigval": True}), ids=str)
def test_options(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    server = Server(max_tokens=5, capacity=4, device=device, **options)
    server = steps(server, 5, evidence, least=2)
    evidence.at_least("folds", server.folds, 1)


@pytest.mark.criterion("5.32")
def test_extreme_gates(device: torch.device, evidence: Evidence) -> None:
    """Decays that underflow and decays of nothing, beta of zero and of one, in the history and in new tokens."""
    server = Server(max_tokens=4, capacity=6, device=device)
    server.A_log[:2] = torch.tensor([-30.0, 20.0])
    for step in range(5):
        inputs = server.tokens(12)
        inputs.a[step % 3 :: 3] = (40.0, -60.0, 5.0)[step % 3]
        inputs.b[(step + 1) % 3 :: 3] = (-90.0, 90.0)[step % 2]
        server.step([4] * 3, evidence, accept=False, inputs=inputs)
        server.accept([4, 2, 3])
    evidence.at_least("folds", server.folds, 4)


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("ctas", SPLITS)
def test_pitches(ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided q, k, v, a, b and o, and gaps between slots, which nobody writes; nothing is copied."""
    split(monkeypatch, ctas)
    server = Server(max_tokens=6, capacity=3, pitched=True, device=device)
    launched = watch(monkeypatch)
    for _ in range(4):
        call = server.step(server.lengths(1), evidence, tail=1)
        inputs, args = call.inputs, next(args for program, args in reversed(launched) if "window" in program.module)
        assert not inputs.a.is_contiguous() and not call.o.view.is_contiguous()
        for name, x in zip(("q", "k", "v", "a", "b"), args, strict=False):
            assert x.data_ptr() == getattr(inputs, name).data_ptr(), f"{name} was copied"
    assert not server.pool.view.is_contiguous() and server.folds


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("ctas", SPLITS)
def test_rejected_nan_never_comes_back(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in a draft token spoils the outputs of its call, and is gone when the token is rejected."""
    split(monkeypatch, ctas)
    server = Server(max_tokens=8, capacity=6, device=device)
    for step in range(6):
        inputs, accepted = server.tokens(24), [(3 * step + n) % 5 for n in range(3)]
        if step % 2 == 0:
            for n, L in enumerate(accepted):
                for name in ("q", *KEPT):
                    getattr(inputs, name)[8 * n + L : 8 * n + 8] = torch.nan
            call = server.call([8] * 3, inputs)
            assert call.o.view[4:8].isnan().all(), "a NaN has no effect"
            server.check_kept(call)
            for record in server.records.values():
                record.pending = False  # its state is in the outputs of the next step
        else:
            server.step([8] * 3, evidence, accept=False, inputs=inputs)
        server.accept(accepted)
    assert server.pool.view.isfinite().all()
    evidence.at_least("folds", server.folds, 3)


@pytest.mark.criterion("5.32")
def test_nan_stays_in_its_request(device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN that request 1 accepts, in one CTA after the others: requests 0 and 2 are bit-equal to a clean run."""
    split(monkeypatch, 3)
    found = []
    for dirty in (False, True):
        server, outputs = Server(max_tokens=4, capacity=3, device=device), []
        for step in range(4):
            inputs = server.tokens(12)
            if dirty and step == 1:
                inputs.v[5] = torch.nan
            call = server.call([4] * 3, inputs)
            server.accept([4, 3, 2])
            outputs.append(call.o.view.clone())
        found.append((torch.stack(outputs), server.pool.view[server.slots]))
    clean, spoilt = found
    assert spoilt[0][1:, 4:8].isnan().any() and spoilt[1][1].isnan().any()
    for rows in (slice(0, 4), slice(8, 12)):
        evidence.equal("outputs changed by a NaN", different(clean[0][:, rows], spoilt[0][:, rows]), 0)
    evidence.equal("states changed by a NaN", different(clean[1][::2], spoilt[1][::2]), 0)


def session(
    device: torch.device, alone: int | None = None, pool: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """Five steps of four requests, or of one of them: its outputs of every step, and the states."""
    server, outputs = Server(N=4, max_tokens=6, capacity=7, pool=pool, device=device), []
    for step in range(5):
        lengths = [(step * 5 + n * 3) % 7 for n in range(4)]
        inputs, accepted = server.tokens(sum(lengths)), [L - (step + n) % 2 if L else 0 for n, L in enumerate(lengths)]
        start = [sum(lengths[:n]) for n in range(5)]
        if alone is None:
            call = server.call(lengths, inputs)
            server.accept(accepted)
        else:
            own: Tokens = inputs[slice(start[alone], start[alone + 1])]
            call = server.call([lengths[alone]], own, [server.slots[alone]])
            server.accept([accepted[alone]])
        outputs.append(call.o.view.clone())
        if alone is None:
            outputs[-1] = torch.cat([outputs[-1], outputs[-1].new_zeros(24 - sum(lengths), *outputs[-1].shape[1:])])
    assert server.folds
    return outputs, server.pool.view[server.slots]


@pytest.mark.criterion("5.32")
def test_bits_do_not_depend_on_the_split(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large tiles, one piece of work a CTA and many: two runs and all splits have the same bits."""
    found = []
    for ctas in (None, None, 3):
        with monkeypatch.context() as patch:
            split(patch, ctas)
            outputs, states = session(device)
            found.append((torch.stack(outputs), states))
    for other in found[1:]:
        evidence.equal("outputs that differ between splits", different(other[0], found[0][0]), 0)
        evidence.equal("states that differ between splits", different(other[1], found[0][1]), 0)


@pytest.mark.criterion("5.32")
@pytest.mark.parametrize("ctas", SPLITS)
def test_a_request_alone_and_in_a_batch(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        split(patch, ctas)
        batch, states = session(device)
    for n in range(4):
        outputs, own = session(device, alone=n)
        for step, o in enumerate(outputs):
            start = sum((step * 5 + m * 3) % 7 for m in range(n))
            evidence.equal("outputs that differ in a batch", different(o, batch[step][start : start + len(o)]), 0)
        evidence.equal("states that differ in a batch", different(own[n], states[n]), 0)


@pytest.mark.criterion("5.32", "5.35")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of requests, of slots, of tokens, and another capacity."""
    launched = watch(monkeypatch)
    sizes: tuple[dict[str, Any], ...] = (
        {"N": 1, "slots": 1, "max_tokens": 1, "capacity": 0},
        {"N": 5, "slots": 9, "max_tokens": 16, "pitched": True},
        {"N": 24, "max_tokens": 2, "capacity": 5, "scale": 0.5, "allow_neg_eigval": True},
    )
    for options in sizes:
        server = steps(Server(device=device, **options), 2, evidence, least=1)
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 2)
    assert len(launched) == 12 and server.folds >= 0
