"""Gate 5: the suite's own inputs and limits see every mutant that outputs can show, and every mutated kernel."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import reference.pool
from reference import mutants
from tests.gate_engine import Evidence
from tests.launch import mutate, refuses
from tests.replay.cases import Case, check, make, padded, run, split
from tests.verify.test_negative_controls import extreme, faint, is_seen

#: the kinds of inputs of this suite, in small
CASES: dict[str, Callable[[], Case]] = {
    "ragged": lambda: make(T=(12, 5, 16), tail=3),
    "fp32 pool": lambda: make(T=(12, 5), pool=torch.float32),
    "padded": lambda: padded(make(T=(5, 5, 12))),
    "beta in (0, 2)": lambda: make(T=(12,), allow_neg_eigval=True),
    "extreme gates": lambda: extreme(make(T=(12,), pool=torch.float32, gate=torch.float32)),
    "scale 0": lambda: make(T=(5,), scale=0.0),
    "faint keys": lambda: faint(make(T=(12,), pool=torch.float32)),
}

#: what needs stored states, and squares in bf16 under a norm, which stay below the rounding of o
INVISIBLE = (
    "snapshots_one_step_late",
    "snapshot_bands_swapped",
    "snapshots_fill_the_row",
    "snapshot_rows_ignored",
    "commit_one_step_short",
    "norm_squared_in_bf16",
)
VISIBLE = [name for name in mutants.names("step", "sequence", "gating", "pool") if name not in INVISIBLE]


@pytest.mark.criterion("5.15")
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_passes(name: str) -> None:
    assert not is_seen(reference.pool.verify_gated_fwd, CASES[name])


@pytest.mark.criterion("5.15")
@pytest.mark.parametrize("name", VISIBLE)
def test_mutant_of_the_reference_is_seen(name: str, evidence: Evidence) -> None:
    seen = any(is_seen(mutants.verify_gated_fwd(name), make_case) for make_case in CASES.values())
    evidence.equal("mutant of the reference refused", seen, True)


#: (what is wrong, pattern in the generated CUDA, replacement, most CTAs)
KERNEL_MUTANTS: tuple[tuple[str, str, str | Callable[[re.Match[str]], str], int | None], ...] = (
    ("beta halved", r"\(beta_scale \* ", "(0.5f * ", None),
    ("no decay", r"(\(\(float\*\)decay\)\[[^=;]*\] = )expf", r"\g<1>1.0f + 0.0f * expf", None),
    ("scale not applied", r" \* scale\)", " * 1.0f)", None),
    ("head map h % H", r"\(int64_t\)head(\w*)\) >> \(int64_t\)1\)", r"(int64_t)head\1) & (int64_t)1)", None),
    ("second parts dropped", r"= \(\w+\[[^;]*\] - \(\(float\)part\w*\[[^;]*;", "= 0.0f;", None),
    ("tokens not waited for", r"tl::cp_async_wait<1>\(\);", "", None),
    ("products of the key head before", r"\((\w+) == 0\) \|\|", r"(\1 == 0) &&", 3),
    ("padding keeps its outputs", r"\(\(0 <= (slot\w*)\) && \(\1 < SLOTS\)\)", "true", None),
    ("rows of no request left as they were", r"\(unused(\w*) < NT\)", "false", None),
    ("slot of the piece before", r"\bslot(\w*) = next_slot\w*;", "", 3),
)


def small() -> tuple[Case, Case]:
    """Ragged, with padding and a tail; and outputs of the state alone, where nothing hides what is wrong with it."""
    ragged, state_alone = make(T=(12, 5, 16, 0, 3), tail=1), make(T=(12, 5))
    ragged.state_indices[4] = -1
    state_alone.v.zero_()
    return ragged, state_alone


@pytest.mark.criterion("5.15")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    mutant: tuple[str, str, str | Callable[[re.Match[str]], str], int | None],
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, pattern, replacement, ctas = mutant
    split(monkeypatch, ctas)
    for case in small():
        run(case)
        check(case, Evidence())
    mutate(monkeypatch, pattern, replacement)
    mutated = small()
    for case in mutated:
        run(case)
    seen = [refuses(lambda case=case: check(case, Evidence())) for case in mutated]  # type: ignore[misc]
    evidence.at_least("cases that see a mutated kernel", sum(seen), 1)
