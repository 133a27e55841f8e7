"""Gate 5: states after the accepted tokens against fp64, and a pool that changes nowhere else, on the emulator or the
GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.gate_engine import Evidence
from tests.launch import watch
from tests.replay.commit_cases import (
    SPECIAL,
    Commit,
    again,
    before,
    check_commit,
    check_others,
    elsewhere,
    keep,
    make,
    run,
    split,
)
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
#: most CTAs of a program: those of the plan, which give few requests the smaller tile; fewer than there is work
SPLITS = (None, 3)
#: what a commit reads of a token, and q, which it does not
INPUTS = ("q", "k", "v", "a", "b")


@pytest.mark.criterion("5.20")
@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("ctas", SPLITS)
def test_every_accepted_length(
    ctas: int | None, T: int, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make(range(T + 1), T, seed=T, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.20")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS[1:], ids=str)
def test_pool_dtypes(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make(range(17), 16, pool=pool, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.20")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("of", ("state", "values"))
def test_either_term_alone(
    of: str, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is a sum of what the old one gives and what the values give: neither hides behind the other."""
    split(monkeypatch, ctas)
    case = make((12, 5, 16, 1, 4), (12, 7, 16, 1, 12), pool=torch.float32, device=device)
    (case.v if of == "state" else case.pool.view).zero_()
    keep(case)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.20")
@pytest.mark.parametrize("ctas", SPLITS)
def test_ragged(ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all lengths, some without tokens, and rows of no request behind them."""
    split(monkeypatch, ctas)
    case = make((9, 8, 0, 7, 1, 0, 3), (9, 8, 0, 7, 13, 0, 16), tail=5, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.20")
@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0)), ids=str)
@pytest.mark.parametrize("tail", (0, 3))
def test_no_requests_and_no_tokens(lengths: tuple[int, ...], tail: int, device: torch.device) -> None:
    case = make((1,) * len(lengths), lengths, tail=tail, device=device)
    run(case)
    assert not case.pool.differs().any()


@pytest.mark.criterion("5.21")
@pytest.mark.parametrize("ctas", SPLITS)
def test_lengths_are_taken_as_the_nearest_possible(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below 0 nothing is accepted; beyond the tokens of the request all of them, and none of those behind them."""
    split(monkeypatch, ctas)
    accepted = (-1, -(2**31), 8, 17, 2**31 - 1, 1, 13)
    case = make(accepted, (5, 3, 7, 16, 4, 0, 12), tail=3, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.21")
@pytest.mark.parametrize("ctas", SPLITS)
def test_rejected_tokens_are_not_looked_at(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all inputs of all tokens that were not accepted, and in those of no request."""
    split(monkeypatch, ctas)
    lengths, accepted = (12, 16, 5, 16, 9, 16), (4, 15, 0, 1, 8, 16)
    case = make(accepted, lengths, tail=3, device=device)
    want = case.expected()
    rejected = torch.ones(len(case.v), dtype=torch.bool, device=device)
    for start, L in zip(case.cu_seqlens.tolist(), accepted, strict=False):
        rejected[start : start + L] = False
    for name in INPUTS:
        getattr(case, name)[rejected] = torch.nan
    run(case)
    check_commit(case, evidence, want)


def put_special_values(case: Commit, requests: Sequence[int]) -> Commit:
    """Some elements of their states are zero with a sign, infinite, or no number."""
    for n in requests:
        state = case.pool.view[case.state_indices[n]]
        for i, x in enumerate(SPECIAL):
            state[:, i::37, i::11] = x
    return keep(case)


@pytest.mark.criterion("5.21", "5.22")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("moved", (False, True), ids=("in place", "moved"))
def test_nothing_accepted(
    moved: bool, pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A state keeps its bits, whatever they are: in its place, and copied to another. Between states that change."""
    split(monkeypatch, ctas)
    case = make((0, 3, -5, 12, 0), (12, 5, 1, 12, 0), slots=12, pool=pool, device=device)
    put_special_values(case, (0, 2, 4))
    if moved:
        elsewhere(case)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.22")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_states_go_where_they_are_sent(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are only read keep their bits; two requests read one slot; one stays in its place by name."""
    split(monkeypatch, ctas)
    case = elsewhere(make((12, 3, 0, 16, 1), (12, 5, 7, 16, 2), slots=11, pool=pool, pitched=True, device=device))
    case.state_indices[1] = case.state_indices[0]
    assert case.targets is not None
    case.targets[3] = case.state_indices[3]
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.22")
def test_given_targets_and_none_are_the_same(device: torch.device, evidence: Evidence) -> None:
    case = make((12, 3, 0), 12, device=device)
    run(case)
    named = again(case)
    named.targets = named.state_indices.clone()
    run(named)
    evidence.equal("elements that differ if targets are given", different(named.pool.view, case.pool.view), 0)


@pytest.mark.criterion("5.22")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("padding", (-1, -(2**31), 9, 2**31 - 1))
def test_padding(
    padding: int, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below and beyond the pool, as the slot that is read, as the one that is written, and as both, with any accepted
    length; NaN in their tokens and in every slot that is not read."""
    split(monkeypatch, ctas)
    case = elsewhere(make((12, 5, 0, 3, 0, 7), (12, 7, 7, 3, 5, 16), slots=12, tail=2, device=device))
    case.pool.view = case.pool.view[:9]
    case.state_indices[:] = torch.tensor([4, padding, padding, 0, 1, padding])
    case.targets = torch.tensor([7, 3, 6, padding, padding, padding], dtype=torch.int32, device=device)
    for name in INPUTS:
        getattr(case, name)[12:] = torch.nan
    case.pool.view[[1, 2, 3, 5, 6, 7, 8]] = torch.nan
    keep(case)
    run(case)
    check_commit(case, evidence)
    evidence.equal("changed elements of slots", int(case.pool.differs().sum()), case.pool.view[7].numel())


@pytest.mark.criterion("5.22")
def test_a_pool_without_slots_is_all_padding(device: torch.device) -> None:
    case = make((12, 1), (12, 1), tail=2, device=device)
    case.pool.view = case.pool.view[:0]
    run(case)
    assert not case.pool.differs().any()


@pytest.mark.criterion("5.22")
def test_neighbours_of_a_state(device: torch.device, evidence: Evidence) -> None:
    """The first and the last slot of a pool, among canaries: not one byte outside of them changes."""
    case = make((5, 12), 12, slots=5, pitched=True, device=device)
    case.state_indices[:] = torch.tensor([4, 0])
    run(case)
    check_commit(case, evidence)
    assert case.pool.changed()[[0, 4]].any(dim=(1, 2, 3)).all()


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pitches(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make((12, 4), (12, 7), pool=pool, pitched=True, tail=1, device=device)
    assert not case.a.is_contiguous() and not case.k.is_contiguous() and not case.pool.view.is_contiguous()
    launched = watch(monkeypatch)
    run(case)
    check_commit(case, evidence)
    ((_, args),) = launched
    for name, x in (("k", args[0]), ("v", args[1]), ("a", args[2]), ("b", args[3])):
        assert x.data_ptr() == getattr(case, name).data_ptr(), f"{name} was copied"
    assert args[6].data_ptr() == case.pool.view.data_ptr(), "the pool was copied"


@pytest.mark.criterion("5.23")
def test_open_strides_of_single_elements(device: torch.device, evidence: Evidence) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones."""
    case = make((1,), 1, H=1, HV=1, slots=1, device=device)
    case.targets = case.state_indices.clone()
    for name in ("k", "v"):
        x = getattr(case, name)
        setattr(case, name, x.as_strided(x.shape, (3, 5, 1)))
    shape, strides = case.pool.view.shape, case.pool.view.stride()
    odd = [7 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    case.pool.view = case.pool.view.as_strided(shape, odd)
    for name in ("state_indices", "targets", "accepted", "A_log", "dt_bias"):
        setattr(case, name, getattr(case, name).as_strided((1,), (9,)))
    run(case)
    check_commit(case, evidence)


@pytest.mark.costly
@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize(("H", "HV"), ((2, 2), (1, 3), (2, 8), (1, 8)))
def test_head_groups(
    H: int, HV: int, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make((5, 13, 2), (5, 16, 5), H=H, HV=HV, bias=torch.bfloat16, device=device)
    run(case)
    check_commit(case, evidence)


@pytest.mark.criterion("5.23")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("V", (64, 256))
def test_value_dim_is_not_key_dim(
    V: int, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make((5, 0, 10), (5, 7, 16), H=1, HV=2, V=V, slots=8, device=device)
    run(elsewhere(case))
    check_commit(case, evidence)


@pytest.mark.criterion("5.24")
@pytest.mark.parametrize("pool", POOLS[::2], ids=str)
def test_bits_do_not_depend_on_the_split(
    pool: torch.dtype, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large tiles, one piece of work a CTA and many: two runs and all splits have the same bits."""
    case = make((12, 1, 7, 0, 0, 16), (12, 1, 16, 0, 7, 16), pool=pool, slots=14, tail=1, device=device)
    elsewhere(case)
    found = []
    for ctas in (None, None, 64, 3):
        with monkeypatch.context() as patch:
            split(patch, ctas)
            mine = again(case)
            run(mine)
            found.append(mine.pool.view)
    for other in found[1:]:
        evidence.equal("elements that differ between splits", different(other, found[0]), 0)


def alone(case: Commit, n: int) -> Commit:
    """Request n of `case` as a call of its own, on a pool of its own."""
    tokens = slice(int(case.cu_seqlens[n]), int(case.cu_seqlens[n + 1]))
    single = dataclasses.replace(again(case), **{name: getattr(case, name)[tokens] for name in INPUTS})
    single.cu_seqlens = torch.tensor([0, case.lengths[n]], dtype=torch.int32, device=case.accepted.device)
    single.state_indices, single.accepted = case.state_indices[n : n + 1], case.accepted[n : n + 1]
    return single


@pytest.mark.criterion("5.24")
@pytest.mark.parametrize("ctas", SPLITS)
def test_a_request_alone_and_in_a_batch(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make((3, 10, 16, 1), (3, 12, 16, 8), device=device)
    with monkeypatch.context() as patch:
        split(patch, ctas)
        run(batch)
    for n, length in enumerate(batch.lengths):
        single, slot = alone(batch, n), batch.state_indices[n]
        run(single, max_tokens=length)
        changed = different(single.pool.view[slot], batch.pool.view[slot])
        evidence.equal("elements that differ in a batch", changed, 0)


@pytest.mark.criterion("5.24")
def test_rejected_tokens_do_not_change_the_bits(device: torch.device, evidence: Evidence) -> None:
    """The accepted tokens as the whole request, and as its beginning."""
    case = make((1, 4, 5, 11), 16, device=device)
    run(case)
    for n, length in enumerate(case.accepted.tolist()):
        single, slot = alone(case, n), case.state_indices[n]
        for name in INPUTS:
            setattr(single, name, getattr(single, name)[:length])
        single.cu_seqlens[1] = length
        run(single)
        changed = different(single.pool.view[slot], case.pool.view[slot])
        evidence.equal("elements that differ if tokens are rejected", changed, 0)


@pytest.mark.criterion("5.24")
@pytest.mark.parametrize("name", ("k", "v", "a", "b", "pool"))
def test_nan_stays_in_its_request(
    name: str, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in an accepted token of request 1 or in its state, in one CTA after the others: all other slots are
    bit-equal to a clean run."""
    split(monkeypatch, 3)
    clean = make((12, 9, 5), (12, 12, 5), device=device)
    dirty = make((12, 9, 5), (12, 12, 5), device=device)
    slot = int(dirty.state_indices[1])
    if name == "pool":
        dirty.pool.view[slot, :, 3, 5] = torch.nan
        keep(dirty)
    else:
        getattr(dirty, name)[18] = torch.nan
    for case in (clean, dirty):
        run(case)
    others = [n for n in range(len(clean.pool.view)) if n != slot]
    changed = different(dirty.pool.view[others], clean.pool.view[others])
    evidence.equal("elements changed by a NaN", changed, 0)
    assert dirty.pool.view[slot].isnan().any(), f"a NaN in {name} has no effect"
    check_others(dirty)


@pytest.mark.criterion("5.24")
def test_inputs_are_only_read(device: torch.device, evidence: Evidence) -> None:
    case = elsewhere(make((12, 0, 3), (12, 5, 7), slots=8, tail=1, device=device))
    names = ("k", "v", "a", "b", "A_log", "dt_bias", "state_indices", "targets", "cu_seqlens", "accepted")
    kept = {name: getattr(case, name).clone() for name in names}
    run(case)
    for name, x in kept.items():
        evidence.equal(f"changed elements of {name}", different(getattr(case, name), x), 0)
    for n in range(3):
        slot = case.state_indices[n]
        evidence.equal("changed elements of a slot read", different(case.pool.view[slot], before(case)[slot]), 0)


@pytest.mark.criterion("5.27")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = watch(monkeypatch)
    sizes: Sequence[tuple[Sequence[int], int, dict[str, Any], int]] = (
        ((1,), 1, {"slots": 1}, 1),
        ((3, 0, 12, 7, 20), 12, {"slots": 11, "pitched": True}, 16),
        ((2, 1) * 20, 2, {"slots": 90}, 2),
    )
    for accepted, T, options, max_tokens in sizes:
        case = make(accepted, T, device=device, **options)
        if len(case.pool.view) >= 2 * len(accepted):
            elsewhere(case)
        run(case, max_tokens)
        check_commit(case, evidence)
    assert len(launched) == 3
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 1)
