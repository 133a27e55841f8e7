"""Gate 3: the suite's own inputs and limits see every mutant of the reference and every mutated kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import reference.pool
from reference import mutants
from tests.gate_engine import Evidence
from tests.launch import mutate, refuses
from tests.verify.cases import Case, check, make, padded


def as_public(function: Callable[..., None]) -> Callable[..., None]:
    """A function of the reference's signature behind the public one."""

    def run(
        A_log: Tensor, a: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, pool: Tensor,
        slots: Tensor, cu_seqlens: Tensor, states: Tensor, rows: Tensor, *, o: Tensor,
        disable_state_update: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        function(
            q, k, v, a, b, A_log, dt_bias, pool, slots, cu_seqlens, o, states, rows,
            commit=not disable_state_update, **{"scale": None, **options},
        )  # fmt: skip

    return run


def extreme(case: Case) -> Case:
    case.A_log[0], case.A_log[1] = -100.0, 100.0
    case.dt_bias[0], case.dt_bias[1] = 3.0, 0.0
    case.a[:, 0] = torch.linspace(10, 100, len(case.a)).to(case.a)
    case.a[:, 1] = -150.0
    return case


def faint(case: Case) -> Case:
    case.q.mul_(2.0**-13)
    case.k.mul_(2.0**-13)
    return case


#: the kinds of inputs of this suite, in small
CASES: dict[str, Callable[[], Case]] = {
    "ragged": lambda: make(T=(12, 5, 16), steps=18, tail=3),
    "fp32 pool": lambda: make(T=(12, 5), steps=16, pool=torch.float32),
    "commit": lambda: make(T=(12, 5), steps=16, disable_state_update=False),
    "padded": lambda: padded(make(T=(5, 5, 12), steps=16)),
    "padded, commit": lambda: padded(make(T=(5, 5, 12), steps=16, disable_state_update=False)),
    "beta in (0, 2)": lambda: make(T=(12,), allow_neg_eigval=True),
    "extreme gates": lambda: extreme(make(T=(12,), pool=torch.float32, gate=torch.float32)),
    "scale 0": lambda: make(T=(5,), scale=0.0),
    "faint keys": lambda: faint(make(T=(12,), pool=torch.float32)),
}


def is_seen(function: Callable[..., None], make_case: Callable[[], Case]) -> bool:
    """Whether `check` refuses what `function` computes."""
    case = make_case()

    def run_and_check() -> None:
        case.run(as_public(function))
        check(case, Evidence())

    return refuses(run_and_check)


@pytest.mark.criterion("3.19")
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_passes(name: str) -> None:
    assert not is_seen(reference.pool.verify_gated_fwd, CASES[name])


@pytest.mark.criterion("3.19")
@pytest.mark.parametrize("name", mutants.names("step", "sequence", "gating", "pool"))
def test_mutant_of_the_reference_is_seen(name: str, evidence: Evidence) -> None:
    seen_by = [case for case, make_case in CASES.items() if is_seen(mutants.verify_gated_fwd(name), make_case)]
    evidence.at_least("cases that see a mutant of the reference", len(seen_by), 1)


#: (what is wrong, pattern in the generated CUDA, replacement)
KERNEL_MUTANTS = (
    ("beta not applied", r"\(\(float\*\)beta_s\)\[[^\]]*\] \* \(", r"1.0f * ("),
    ("output before the update", r"\((\w+) <= (\(\(\(int\)threadIdx\.x\) & 3\)\))", r"(\1 < \2"),
    ("head map h % H", r">> \(int64_t\)3\) \* \(int64_t\)128\)", r">> (int64_t)2 & (int64_t)1) * (int64_t)128)"),
    ("snapshots one step late", r"\* \(\(int64_t\)lds\)", r"* ((int64_t)lds) + ((int64_t)lds)"),
    ("no decay between tokens", r"\(d(?:_\d+)? \* R\[", r"(1.0f * R["),
)


@pytest.mark.criterion("3.19")
@pytest.mark.parametrize(("name", "pattern", "replacement"), KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    name: str, pattern: str, replacement: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, pattern, replacement)
    case = make(T=(6, 6), steps=8)
    case.run()
    evidence.equal("mutated kernel refused", refuses(lambda: check(case, Evidence())), True)
