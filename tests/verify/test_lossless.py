"""Gate 3, lossless: bit-identical to calls of one token each, right, and told apart from what is not lossless."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reference.pool
from kernels import runtime
from tests.data import RealInput, load_real_inputs
from tests.gate_engine import Evidence
from tests.launch import emulate, mutate
from tests.limits import ROUNDING
from tests.verify import test_gates_and_scales, test_real_inputs
from tests.verify.cases import Case, check, make, relative_l2
from tests.verify.one_token import differences, different, one_token_calls

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
EVERY_LENGTH = (*range(1, 17), 0, 17, 33)


def expect_equal_bits(case: Case, evidence: Evidence) -> None:
    """Run `case` and compare with one-token calls."""
    case.run()
    for what, count in differences(case, one_token_calls(case)).items():
        evidence.equal(f"{what}: elements that differ from one-token calls", count, 0)


@pytest.mark.criterion("3.28")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_bits_of_one_token_calls(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    steps = 0
    for seed in range(2 if device.type == "cpu" else 50):
        case = make(T=EVERY_LENGTH, pool=pool, seed=seed, lossless=True, device=device)
        case.A_log[0] = -6.0  # one head that remembers
        expect_equal_bits(case, evidence)
        steps += sum(EVERY_LENGTH) * case.v.shape[1]
    evidence.at_least("(request, head, token) steps compared", steps, 1000)


#: what changes the program or its arguments; commits compare the slot too
VARIANTS: tuple[dict[str, Any], ...] = (
    {"T": (12, 0, 20, 1), "disable_state_update": False, "tail": 3},
    {"T": (12, 5), "H": 1, "HV": 3, "V": 64, "pitched": True, "steps": 14, "pool": torch.float16},
    {"T": (5, 16), "H": 2, "HV": 8, "V": 256, "gate": torch.float32, "bias": torch.bfloat16, "allow_neg_eigval": True},
    {"T": (17, 9), "H": 1, "HV": 2, "fuse_gating": False, "allow_neg_eigval": True, "scale": -0.3},
    {"T": (12, 5), "H": 1, "HV": 2, "use_qk_l2norm_in_kernel": False, "scale": 0.01, "pool": torch.float32},
    {"T": (12, 5), "H": 1, "HV": 2, "scale": 0.0},
)


@pytest.mark.criterion("3.28")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_bits_in_every_variant(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    for seed in range(1 if device.type == "cpu" else 50):
        case = test_gates_and_scales.tame(make(seed=seed, lossless=True, device=device, **options))
        expect_equal_bits(case, evidence)


@pytest.mark.costly
@pytest.mark.criterion("3.28")
@pytest.mark.parametrize("real", load_real_inputs(), ids=lambda real: real.name)
def test_bits_of_a_real_layer(real: RealInput, device: torch.device, evidence: Evidence) -> None:
    case = test_real_inputs.as_case(real, torch.bfloat16, device)
    case.options["lossless"] = True
    expect_equal_bits(case, evidence)


@pytest.mark.criterion("3.29")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_every_step_is_right(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """Each token once more in fp64, from the state that the kernel stored before it: errors cannot hide in a chain."""
    case = make(T=(16, 16, 1, 16), pool=pool, lossless=True, device=device)
    case.run()
    stored = [case.states.view[case.rows[n], :length] for n, length in enumerate(case.lengths)]
    before = [torch.cat([case.pool.view[case.state_indices[n], None], states[:-1]]) for n, states in enumerate(stored)]
    NT = len(case.q)
    o = torch.zeros(case.o.view.shape, dtype=torch.float64, device=device)
    after = torch.zeros(NT, 1, *case.pool.view.shape[1:], dtype=torch.float64, device=device)
    rows = torch.arange(NT + 1, dtype=torch.int32, device=device)
    inputs = {name: getattr(case, name).double() for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
    reference.pool.verify_gated_fwd(
        **inputs, ssm_states=torch.cat(before).double(), state_indices=rows[:NT], cu_seqlens=rows, o=o,
        intermediate_states=after, dtype=torch.float64,
    )  # fmt: skip
    got, want = torch.cat(stored), after[:, 0]
    evidence.at_most("o of each token, relative L2 against fp64", relative_l2(case.o.view, o), ROUNDING[torch.bfloat16])
    evidence.at_most(f"{str(pool)[6:]} states of each token, relative L2", relative_l2(got, want), ROUNDING[pool])
    if pool != torch.float32:
        # fp32 arithmetic is off by about 1e-7, a spacing of the pool's dtype is 4e-3 or 5e-4: few values lie so close
        # to the middle between two that they are rounded to the other one
        limit = {torch.bfloat16: 5e-4, torch.float16: 4e-3}[pool]
        missed = different(got, want.to(pool)) / got.numel()
        evidence.at_most(f"share of {str(pool)[6:]} elements not rounded as fp64 is", missed, limit)


#: other ways to spread a tile over threads: lanes of a row, rows of a lane, warps of a CTA
MAPPINGS: tuple[dict[str, int], ...] = (
    {"lanes": 4, "blocks_per_sm": 4},
    {"lanes": 16},
    {"BV": 64},
    {"BV": 16, "threads": 64},
)


@pytest.mark.costly
@pytest.mark.criterion("3.30")
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_bits_of_other_thread_mappings(
    mapping: dict[str, int], device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [make(T=(12, 17), H=1, HV=2, lossless=True, device=device) for _ in range(2)]
    cases[0].run()
    real = runtime.launch

    def remapped(program: runtime.Program, *args: Any) -> None:
        real(dataclasses.replace(program, config=dataclasses.replace(program.config, **mapping)), *args)

    monkeypatch.setattr(runtime, "launch", remapped)
    cases[1].run()
    for what in ("o", "states"):
        x, y = (getattr(case, what).view for case in cases)
        evidence.equal(f"{what}: elements that differ between thread mappings", different(x, y), 0)


Replacement = str | Callable[[re.Match[str]], str]

#: (what is wrong, pool, pattern in the generated CUDA, replacement): each computes the recurrence, with other roundings
MUTANTS: tuple[tuple[str, torch.dtype, str, Replacement], ...] = (
    (
        "fp32 carried from token to token",
        torch.bfloat16,
        r"\n(\s*)(S\[[^\n]*\] = \(\*\(float \*\)\(&\(v_\w*\)\)\);)",
        r"\n\1if (t == 0 && block == 0) \2",
    ),
    (
        "lanes added in another order",
        torch.float32,
        r"(__shfl_xor_sync\(\(uint\)4294967295, products\[\w+\], )([41]), 32\)",
        lambda match: f"{match[1]}{5 - int(match[2])}, 32)",
    ),
    (
        "the other product fused into the new state",
        torch.float32,
        r"__fmaf_rn\((u\[\w+\]), (key_1\[[^\]]*\]), __fmul_rn\(decay, (S\[[^\]]*\])\)\)",
        r"__fmaf_rn(decay, \3, __fmul_rn(\1, \2))",
    ),
)


@pytest.mark.criterion("3.31")
@pytest.mark.parametrize(("name", "pool", "pattern", "replacement"), MUTANTS, ids=[row[0] for row in MUTANTS])
def test_other_roundings_are_seen(
    name: str, pool: torch.dtype, pattern: str, replacement: Replacement, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """T tokens by a mutated kernel, one-token calls by the program as it is."""
    case = make(T=(12,), H=1, HV=2, pool=pool, lossless=True)
    mutate(monkeypatch, pattern, replacement)
    case.run()
    check(case, evidence)  # a mutant is no worse against fp64: only the comparison of bits sees it
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    found = differences(case, one_token_calls(case))
    evidence.at_least("snapshot elements by which other roundings are seen", found["snapshots"], 1)


@pytest.mark.criterion("3.31")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_what_the_default_mode_loses(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """Against one-token calls, at almost no decay: nothing is forgotten, so no rounding is either."""
    T = 16
    case = make(N=2, T=T, H=1, HV=2, pool=pool, device=device)
    case.A_log[:] = -6.0
    case.run()
    lossless = dataclasses.replace(case, options={"lossless": True})
    want = one_token_calls(lossless)
    got = torch.stack([case.states.view[case.rows[n], :T] for n in range(2)])
    states = torch.stack(want.states)
    name = str(pool)[6:]
    evidence.at_least(f"{name} snapshot elements of the default mode that differ", different(got, states), 1)
    # one-token calls have rounded t times before token t, and both round what they store: t + 2 independent roundings
    for t in range(T):
        error = relative_l2(got[:, t], states[:, t].double())
        evidence.at_most(
            f"{name} states of the default mode, relative L2 over that of sqrt(t + 2) roundings",
            error / (ROUNDING[pool] * math.sqrt(t + 2)), 1.0,
        )  # fmt: skip
    error = relative_l2(got[:, -1], states[:, -1].double())
    evidence.note(f"{name} states of the default mode after {T} tokens, relative L2", error)
    error = relative_l2(case.o.view, want.o.double())
    evidence.note(f"o of the default mode with a {name} pool, relative L2", error)
