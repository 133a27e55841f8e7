"""vLLM's semantics of the paged update, against the fp64 loop of cases.py, and wrong adapters that it catches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from integration.vllm import paged
from tests.gate_engine import Evidence
from tests.integration.vllm.cases import ROUNDING, Case, Errors, make, measure

POOLS = (torch.bfloat16, torch.float32)


def check(case: Case, evidence: Evidence) -> None:
    errors = measure(case)
    evidence.at_most("o: worst relative L2 of a row", errors.o, ROUNDING[torch.bfloat16] * 1.25)
    evidence.at_most(f"states: worst relative L2, {case.pool.dtype} pool", errors.states, ROUNDING[case.pool.dtype])
    evidence.equal("elements changed in slots that stay as they are", errors.touched, 0)
    evidence.equal("outputs of nobody that are not zero", errors.nobody, 0)


@pytest.mark.criterion("6.20")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("columns", (2, 4, 9, 16))
def test_columns_over_random_acceptance(columns: int, pool: torch.dtype, evidence: Evidence) -> None:
    draw = random.Random(columns)
    accepted = [1, columns, *(draw.randint(1, columns) for _ in range(3))]
    draw.shuffle(accepted)
    check(make([columns] * 5, accepted, columns, pool=pool, seed=columns), evidence)


@pytest.mark.criterion("6.20")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_rounds_carry_on(pool: torch.dtype, evidence: Evidence) -> None:
    """Five rounds on one pool: each starts from what the one before left in the column that was accepted."""
    draw = random.Random(5)
    accepted, states = [1, 1, 1], None
    for step in range(5):
        case = make([4] * 3, accepted, 4, pool=pool, seed=step)
        if states is not None:
            case.pool.copy_(states[0])
            case.arguments["ssm_state_indices"].copy_(states[1])
        check(case, evidence)
        states = (case.pool.clone(), case.arguments["ssm_state_indices"].clone())
        accepted = [draw.randint(1, 4) for _ in range(3)]


@pytest.mark.criterion("6.20", "6.22")
@pytest.mark.parametrize("seed", range(3))
def test_ragged_columns(seed: int, evidence: Evidence) -> None:
    """Fewer tokens than columns, none at all, and an accepted column beyond the tokens of this round."""
    draw = random.Random(seed)
    lengths = [0, 1, 5, *(draw.randint(0, 5) for _ in range(3))]
    draw.shuffle(lengths)
    check(make(lengths, [draw.randint(1, 5) for _ in lengths], 5, tail=3, seed=seed, H=1, HV=3), evidence)


@pytest.mark.criterion("6.21")
@pytest.mark.parametrize("null", (0, -1, -(2**31)))
def test_skipped_requests(null: int, evidence: Evidence) -> None:
    case = make([3, 3, 3, 3], [2, 1, 3, 3], 3, padded=(1, 3), tail=2)
    case.arguments["ssm_state_indices"][[1, 3]] = null
    check(case, evidence)


@pytest.mark.criterion("6.21")
@pytest.mark.parametrize("column", range(3))
def test_skipped_columns(column: int, evidence: Evidence) -> None:
    """One null column among others: its state is lost, or, where it is the first one, the whole request skipped."""
    case = make([3, 3], [2, 3], 3, seed=column)
    case.arguments["ssm_state_indices"][0, column] = 0
    check(case, evidence)


@pytest.mark.criterion("6.21")
@pytest.mark.parametrize("accepted", (0, -5, 2**31 - 1, -(2**31)))
def test_accepted_out_of_range(accepted: int, evidence: Evidence) -> None:
    """0 reads column 0, and nothing reads outside of the request's own columns, in a padded row or another."""
    check(make([3, 3, 3], [2, accepted, accepted], 3, padded=(2,), seed=3), evidence)


@pytest.mark.criterion("6.21")
def test_slot_pitch_and_spare_rows(evidence: Evidence) -> None:
    """Slots of a page that is larger than a state, and metadata with more rows than requests."""
    case = make([2, 2], [1, 2], 2)
    pages = torch.full((len(case.pool), case.pool[0].numel() + 64), 5.0, dtype=case.pool.dtype)
    view = pages[:, :-64].view(case.pool.shape)
    view.copy_(case.pool)
    case.arguments["initial_state"] = view
    for name, spare in (("ssm_state_indices", 1), ("num_accepted_tokens", 9)):
        x = case.arguments[name]
        case.arguments[name] = torch.cat([x, x.new_full((2, *x.shape[1:]), spare)])
    check(case, evidence)
    evidence.equal("elements changed beside the states", int((pages[:, -64:] != 5).sum()), 0)


@pytest.mark.criterion("6.22")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("lengths", ([1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0]), ids=str)
def test_one_dimension(lengths: list[int], pool: torch.dtype, evidence: Evidence) -> None:
    check(make(lengths, None, padded=(0,) if len(lengths) == 4 else (), pool=pool, H=2, HV=6), evidence)


@pytest.mark.criterion("6.22")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_packed_decode(pool: torch.dtype, evidence: Evidence) -> None:
    """The other function that vLLM decodes with: rows as the convolution leaves them, and the caller's output."""
    case = make([1, 1, 1, 1], None, padded=(2,), pool=pool)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        out = torch.full((4, 1, *v.shape[2:]), float("nan"), dtype=v.dtype)
        mixed = torch.cat([x[0].flatten(1) for x in (q, k, v)], dim=1)
        result, states = paged.packed_decode(mixed_qkv=mixed, scale=k.shape[3] ** -0.5, out=out, **arguments)
        assert result is out
        return out.view(v.shape), states

    errors = measure(case, packed)
    evidence.at_most("o: worst relative L2 of a row", errors.o, ROUNDING[torch.bfloat16] * 1.25)
    evidence.at_most(f"states: worst relative L2, {pool} pool", errors.states, ROUNDING[pool])
    evidence.equal("elements changed in slots that stay as they are", errors.touched, 0)
    evidence.equal("outputs of nobody that are not zero", errors.nobody, 0)


REFUSED: tuple[dict[str, Any], ...] = (
    {"is_kda": True},
    {"inplace_final_state": False},
    {"beta": 2.0},
    {"threshold": 10.0},
    {"cu_seqlens": None},
    {"num_accepted_tokens": None},
    {"scale": "big"},
)


@pytest.mark.criterion("6.23")
@pytest.mark.parametrize("wrong", REFUSED, ids=str)
def test_refusals_write_nothing(wrong: dict[str, Any], evidence: Evidence) -> None:
    case = make([2, 2], [1, 2], 2)
    before = case.pool.clone()
    with pytest.raises((NotImplementedError, TypeError, ValueError)):
        paged.paged_update(**case.arguments | wrong)
    evidence.equal("elements of the pool changed", int((case.pool != before).sum()), 0)


@pytest.mark.criterion("6.23")
def test_more_columns_than_are_served(evidence: Evidence) -> None:
    case = make([17], [1], 17)
    before = case.pool.clone()
    with pytest.raises(ValueError):
        paged.paged_update(**case.arguments)
    evidence.equal("elements of the pool changed", int((case.pool != before).sum()), 0)


def shifted_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after token t goes to the slot of column t + 1, and is read from the one before."""
    rewired(monkeypatch, lambda slots, accepted, options: (slots.roll(-1, 1), accepted, options))


def null_block_written(monkeypatch: pytest.MonkeyPatch) -> None:
    rewired(monkeypatch, lambda slots, accepted, options: (slots, accepted, options | {"lowest_slot": 0}))


def first_slot_at_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    rewired(monkeypatch, lambda slots, accepted, options: (slots, accepted + 1, options))


def first_slot_always_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rewired(monkeypatch, lambda slots, accepted, options: (slots, torch.ones_like(accepted), options))


def last_state_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the state after the last token is kept, in every column."""

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        o = public(*arguments, **options)
        pool, slots = arguments[7], arguments[8].long()
        pool[slots[slots[:, 0] > 0]] = pool[slots[slots[:, 0] > 0]][:, -1:].clone()
        return o

    public = paged.paged_recurrent_gated_delta_rule_verify
    monkeypatch.setattr(paged, "paged_recurrent_gated_delta_rule_verify", wrong)


def rewired(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
    """The public function gets `change(slot_table, accepted_lengths, options)`."""
    public: Callable[..., Tensor] = paged.paged_recurrent_gated_delta_rule_verify

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        slots, accepted, options = change(arguments[8], arguments[9], options)
        return public(*arguments[:8], slots, accepted, *arguments[10:], **options)

    monkeypatch.setattr(paged, "paged_recurrent_gated_delta_rule_verify", wrong)


WRONG: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    shifted_columns,
    null_block_written,
    first_slot_at_accepted,
    first_slot_always_zero,
    last_state_everywhere,
)


@pytest.mark.criterion("6.24")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_adapters_are_caught(
    wrong: Callable[[pytest.MonkeyPatch], None], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make([3, 3, 3], [2, 1, 3], 3, padded=(1,), seed=8)
    wrong(monkeypatch)
    errors = measure(case)
    evidence.at_least("signs of it", sum(signs(errors)), 1)
    for name, value in vars(errors).items():
        evidence.note(name, value)


def signs(errors: Errors) -> Iterator[int]:
    yield errors.o > 10 * ROUNDING[torch.bfloat16]
    yield errors.states > 10 * ROUNDING[torch.bfloat16]
    yield errors.touched > 0
    yield errors.nobody > 0
