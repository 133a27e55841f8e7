"""Gate 5: the suite's own inputs and limits see every mutant that states can show, and every mutated commit kernel."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reference.pool
from reference import mutants
from tests.gate_engine import Evidence
from tests.launch import mutate, refuses
from tests.replay.commit_cases import Commit, check_commit, elsewhere, keep, make, run, split
from tests.verify.cases import padded
from tests.verify.test_negative_controls import extreme, faint

#: the kinds of inputs of this suite, in small
CASES: dict[str, Callable[[], Commit]] = {
    "ragged": lambda: make((9, 0, 16, -1, 20), (12, 5, 16, 3, 4), tail=3),
    "fp32 pool": lambda: make((12, 3), (12, 5), pool=torch.float32),
    "padded": lambda: as_made(padded(make((5, 5, 12), (5, 5, 12)))),
    "moved": lambda: elsewhere(make((9, 0, 1), 12, slots=8)),
    "padded target": lambda: without_target(elsewhere(make((9, 3), 12, slots=8))),
    "beta in (0, 2)": lambda: make((12,), 12, allow_neg_eigval=True),
    "extreme gates": lambda: as_made(extreme(make((12,), 12, pool=torch.float32, gate=torch.float32))),
    "faint keys": lambda: as_made(faint(make((12,), 12, pool=torch.float32))),
}


def as_made(case: Any) -> Commit:
    """What an edit of a case returned is the case."""
    assert isinstance(case, Commit)
    return case


def without_target(case: Commit) -> Commit:
    assert case.targets is not None
    case.targets[1] = -1
    return case


def is_seen(function: Callable[..., None], make_case: Callable[[], Commit]) -> bool:
    """Whether `check_commit` refuses what a function of the signature of `reference.pool.commit_tokens` computes."""
    case = make_case()

    def run_and_check() -> None:
        targets = case.state_indices if case.targets is None else case.targets
        function(
            case.k, case.v, case.a, case.b, case.A_log, case.dt_bias, case.pool.view, case.state_indices, targets,
            case.cu_seqlens, case.accepted, **case.options,
        )  # fmt: skip
        check_commit(case, Evidence())

    return refuses(run_and_check)


@pytest.mark.criterion("5.27")
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_passes(name: str) -> None:
    assert not is_seen(reference.pool.commit_tokens, CASES[name])


#: what only outputs show
INVISIBLE = ("read_before_update", "scale_before_norm", "scale_zero_is_default")
VISIBLE = [name for name in mutants.names("step", "sequence", "gating") if name not in INVISIBLE]


@pytest.mark.criterion("5.27")
@pytest.mark.parametrize("name", VISIBLE)
def test_mutant_of_the_recurrence_is_seen(name: str, evidence: Evidence) -> None:
    of_verify = mutants.verify_gated_fwd(name)
    assert isinstance(of_verify, functools.partial)
    mutant = functools.partial(reference.pool.commit_tokens, **of_verify.keywords)
    seen = any(is_seen(mutant, make_case) for make_case in CASES.values())
    evidence.equal("mutant of the recurrence refused", seen, True)


Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # pool, read, target, lengths


def last_token_dropped(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, target, L - 1


def all_tokens_accepted(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, target, torch.full_like(L, 16)


def one_token_at_least(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, target, L.clamp(min=1)


def negative_lengths_count_from_the_end(
    pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor
) -> Slots:
    return pool, read, target, torch.where(L < 0, L + 3, L)


def targets_ignored(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, read, L


def nothing_accepted_is_not_copied(
    pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor
) -> Slots:
    return pool, read, torch.where(L > 0, target, -1), L


def padding_reads_slot_0(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read.clamp(min=0), target.clamp(min=0), L


def padding_of_the_target_writes_in_place(
    pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor
) -> Slots:
    return pool, read, torch.where(target < 0, read, target), L


def requests_trade_lengths(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, target, L.flip(0)


def slot_next_door(pool: torch.Tensor, read: torch.Tensor, target: torch.Tensor, L: torch.Tensor) -> Slots:
    return pool, read, (target + 1) % len(pool), L


@pytest.mark.criterion("5.27")
@pytest.mark.parametrize(
    "change",
    (
        last_token_dropped, all_tokens_accepted, one_token_at_least, negative_lengths_count_from_the_end,
        targets_ignored, nothing_accepted_is_not_copied, padding_reads_slot_0, padding_of_the_target_writes_in_place,
        requests_trade_lengths, slot_next_door,
    ),
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_mutant_of_the_bookkeeping_is_seen(change: Callable[..., Slots], evidence: Evidence) -> None:
    def mutant(*args: Any, **options: Any) -> None:
        pool, read, target, cu_seqlens, lengths = args[6:]
        pool, read, target, lengths = change(pool, read, target, lengths)
        changed = (*args[:6], pool, read, target, cu_seqlens, lengths)
        reference.pool.commit_tokens(*changed, **options)

    seen = any(is_seen(mutant, make_case) for make_case in CASES.values())
    evidence.equal("mutant of the bookkeeping refused", seen, True)


@pytest.mark.criterion("5.27")
def test_swapped_bands_are_seen(evidence: Evidence) -> None:
    """The two halves of V trade places in what is stored."""

    def mutant(*args: Any, **options: Any) -> None:
        reference.pool.commit_tokens(*args, **options)
        pool, target = args[6], args[8]
        pool[target.long()] = pool[target.long()].roll(pool.shape[-2] // 2, dims=-2)

    evidence.equal("swapped bands refused", is_seen(mutant, CASES["fp32 pool"]), True)


#: (what is wrong, pattern in the generated CUDA, replacement, most CTAs)
KERNEL_MUTANTS: tuple[tuple[str, str, str | Callable[[re.Match[str]], str], int | None], ...] = (
    ("beta halved", r"\(beta_scale \* ", "(0.5f * ", None),
    ("no decay", r"(\(\(float\*\)decay\)\[[^=;]*\] = )expf", r"\g<1>1.0f + 0.0f * expf", None),
    ("the old state does not decay", r"\(decay_\d+ \* (?=\(*(?:\(float\))?state)", "(1.0f * ", None),
    ("updates do not decay afterwards", r"\bw(\w*) = \(w\1 \* decays\w*\[[1-9]\d*\]\);", "", None),
    ("gates of rejected tokens", r"\(\(\(int\)threadIdx\.x\) & 31\) < L\w*\)", "true)", None),
    ("last accepted token dropped", r"min\(lengths\[((?:[^][]|\[[^]]*\])*)\], ", r"min(lengths[\1] - 1, ", None),
    ("all tokens accepted", r"min\(lengths\[((?:[^][]|\[[^]]*\])*)\], ", "min(16, ", None),
    ("head map h % H", r"\(\(\(int64_t\)head(\w*)\) >> \(int64_t\)1\)", r"(((int64_t)head\1) & (int64_t)1)", None),
    ("second parts of Z dropped", r"= \(sums\w*\[[^;]*\] - \(\(float\)z\w*\[[^;]*;", "= 0.0f;", None),
    ("second parts of P dropped", r"= \(P\w*\[[^;]*\] - \(\(float\)part\w*\[[^;]*;", "= 0.0f;", None),
    ("second parts of W and N dropped", r"= \(x\w*\[[^;]*\] - \(\(float\)part\w*\[[^;]*;", "= 0.0f;", None),
    ("W and N swapped", r"(\(bfloat16_t\*\)tables\) \+ \(+)\((\(\(int\)threadIdx\.x\) & 31\) >> 4)\)",
     r"\1(1 - (\2))", None),
    ("states go where they came from", r"int target_(\d+) = target", r"int target_\1 = slot", None),
    ("nothing accepted, not copied", r"if \(target(\w*) != slot(\w*)\)", "if (false)", None),
    ("tokens not waited for", r"tl::cp_async_wait<1>\(\);", "", None),
    ("keys of the head before", r"\((\w+) == 0\) \|\|", r"(\1 == 0) &&", 3),
    ("slot of the piece before", r"\bslot(\w*) = next_slot\w*;", "", 3),
    ("target of the piece before", r"\btarget(\w*) = next_target\w*;", "", 3),
    ("length of the piece before", r"\bL(\w*) = next_L\w*;", "", 3),
)  # fmt: skip


def small() -> tuple[Commit, ...]:
    """In place and moved, with padding and a tail, both dtypes of most states; and the old states alone, in which
    nothing hides what is wrong with them."""
    moved = elsewhere(make((9, 0, 5, 3), (12, 5, 16, 3), slots=10, tail=1))
    moved.state_indices[3] = -1
    state_alone = make((12, 5, -4), (12, 7, 2), pool=torch.float32)
    state_alone.v.zero_()
    return moved, keep(state_alone), make((1, 12, 16), (12, 12, 16), pool=torch.float32)


@pytest.mark.criterion("5.27")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("ctas", (None, 3))
def test_the_kernel_itself_passes(ctas: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, ctas)
    for case in small():
        run(case)
        check_commit(case, Evidence())


@pytest.mark.criterion("5.27")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    mutant: tuple[str, str, str | Callable[[re.Match[str]], str], int | None],
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, pattern, replacement, ctas = mutant
    split(monkeypatch, ctas)
    mutate(monkeypatch, pattern, replacement)

    def is_refused(case: Commit) -> bool:
        run(case)
        return refuses(lambda: check_commit(case, Evidence()))

    evidence.equal("mutated kernel refused", any(is_refused(case) for case in small()), True)
