"""Gate 4: wrong gates, wrong norms and edited kernels are seen; the bits see another order of a sum."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import runtime, verify
from reference import gating, mutants
from tests.emulator import load
from tests.gate_engine import Evidence
from tests.launch import emulate
from tests.prepass.cases import Case, check, make
from tests.prepass.test_values import extreme_gates, odd_vectors
from tests.verify import cases
from tests.verify.one_token import different

#: the kinds of inputs of this suite
CASES: dict[str, Callable[[], Case]] = {
    "random": lambda: make(21),
    "beta in (0, 2)": lambda: make(21, allow_neg_eigval=True),
    "extreme gates": lambda: extreme_gates("cpu"),
    "odd vectors": lambda: odd_vectors("cpu"),
}


def refuses(case: Case) -> bool:
    try:
        check(case, Evidence())
    except AssertionError:
        return True
    return False


def seen_by(gates: Callable[..., Any] = gating.gates, norm: Callable[[Tensor], Tensor] = gating.inverse_norm) -> int:
    """How many kinds of inputs tell these functions, computed in fp32, from the reference."""
    seen = 0
    for make_case in CASES.values():
        case = make_case()
        q, k, a, b, A_log, dt_bias = (x.float() for x in case.inputs)
        allow_neg_eigval = case.options.get("allow_neg_eigval", False)
        values = (*gates(A_log, a, dt_bias, b, allow_neg_eigval), norm(q), norm(k))
        for buffer, value in zip(case.outputs, values, strict=True):
            buffer.view.copy_(value)
        seen += refuses(case)
    return seen


@pytest.mark.criterion("4.12")
def test_the_reference_itself_passes() -> None:
    assert seen_by() == 0


@pytest.mark.criterion("4.12")
@pytest.mark.parametrize("name", mutants.names("gating"))
def test_gates_of_a_mutant_are_seen(name: str, evidence: Evidence) -> None:
    gates = mutants.verify_gated_fwd(name).keywords["gates"]  # type: ignore[attr-defined]
    evidence.at_least("inputs that see gates of a mutant", seen_by(gates=gates), 1)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "no epsilon": lambda x: x.square().sum(-1).rsqrt(),
    "epsilon outside the root": lambda x: 1 / (x.norm(dim=-1) + 1e-6),
    "clamped to epsilon": lambda x: 1 / x.norm(dim=-1).clamp(min=1e-6),
    "a mean for the sum": lambda x: (x.square().mean(-1) + 1e-6).rsqrt(),
    "squares rounded to bf16": lambda x: (x.square().bfloat16().float().sum(-1) + 1e-6).rsqrt(),
    "with the scale": lambda x: gating.inverse_norm(x) * x.shape[-1] ** -0.5,
    "of another head": lambda x: gating.inverse_norm(x.roll(1, 1)),
}


@pytest.mark.criterion("4.12")
@pytest.mark.parametrize("name", NORMS)
def test_wrong_norms_are_seen(name: str, evidence: Evidence) -> None:
    evidence.at_least("inputs that see a wrong norm", seen_by(norm=NORMS[name]), 1)


#: (what is wrong, pattern in the generated CUDA, replacement)
KERNEL_MUTANTS = (
    ("q for k", r"\bby_k\[0\] : by_k\[1\]", "by_q[2] : by_q[3]"),
    ("beyond the diagonal", r"\bby_q\[2\] : by_q\[3\]", "by_q[3] : by_q[2]"),
    ("one of two chains", r"by_k\[i_(\d+)\] \+ by_k\[\(i_\1 \+ 4\)\]", r"by_k[i_\1]"),
    ("no epsilon", r"0x1\.0c6f7a0b5ed8dp-20f", "0.0f"),
    ("the next token's a", r"\(float\)a\[", "(float)a[lda + "),
    ("no range of beta", r"\(beta_scale \* ", "(1.0f * "),
    ("another head's A_log", r"= A_log\[", "= A_log[1 ^ "),
)


def edited(pattern: str, replacement: str) -> Callable[..., None]:
    """A launcher of kernels in whose generated source something was replaced."""

    def patch(source: str) -> str:
        changed, count = re.subn(pattern, replacement, source)
        assert count, f"{pattern!r} is not in the generated source"
        return changed

    def launch(program: runtime.Program, *args: Any) -> None:
        load(runtime.lower(program), patch=patch)(*args)

    return launch


@pytest.mark.criterion("4.12")
@pytest.mark.parametrize(("name", "pattern", "replacement"), KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    name: str, pattern: str, replacement: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cpu_launcher", edited(pattern, replacement))
    case = make(12, allow_neg_eigval=True)
    case.a = torch.cat((case.a, case.a[:1]))[:-1]  # a row beyond the last, for what reads there
    case.q[1], case.k[1] = 0, 0
    case.run()
    evidence.equal("mutated kernel refused", refuses(case), True)


@pytest.mark.criterion("4.12")
@pytest.mark.parametrize("way", ("one chain", "torch"))
def test_norms_summed_in_another_order_change_bits(
    way: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pass the comparison with fp64, and verify on them leaves other bits: equal bits are no accident."""
    case = cases.make(T=(12, 16), H=2, HV=6, pool=torch.float32)
    of = make(len(case.q), 2, 6)
    of.q, of.k, of.a, of.b, of.A_log, of.dt_bias = case.q, case.k, case.a, case.b, case.A_log, case.dt_bias
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    case.run()
    if way == "one chain":
        both_halves = r"(float\*>\(by_[kq]) \+ \(half \* 4\)"
        monkeypatch.setattr(runtime, "cpu_launcher", edited(both_halves, r"\1 + 0"))
        of.run()
        monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    else:
        of.run()
        of.q_inv_norm.view.copy_(gating.inverse_norm(of.q))
        of.k_inv_norm.view.copy_(gating.inverse_norm(of.k))
    check(of, evidence, " summed in another order")
    g, beta, q_inv_norm, k_inv_norm = (buffer.view for buffer in of.outputs)
    states = torch.full_like(case.states.view, torch.nan)
    verify.fused_recurrent_gdr_verify_fwd(
        case.q, case.k, case.v, g, beta, case.pool.view, case.state_indices, case.cu_seqlens,
        torch.empty_like(case.o.view), states, case.rows, q_inv_norm=q_inv_norm, k_inv_norm=k_inv_norm,
    )  # fmt: skip
    evidence.at_least("state elements changed by another order", different(states, case.states.view), 1)
