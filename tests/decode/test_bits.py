"""Gate 2, paged decode: the bits of lossless verify, of any batch, of any run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode
from tests.decode.cases import DecodeCase, make, most_requests_of_the_small_tile
from tests.gate_engine import Evidence
from tests.verify import cases as verify_cases
from tests.verify.cases import GUARD, Case
from tests.verify.one_token import OneToken, differences, different
from tests.verify.test_gates_and_scales import tame

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = ("scale", "use_qk_l2norm_in_kernel", "allow_neg_eigval")


def decode_calls(case: Case) -> OneToken:
    """As many calls as the longest request of `case` has tokens, all requests side by side, in place."""
    slots = case.pool.before.as_strided(case.pool.view.shape, case.pool.view.stride(), GUARD).clone()
    o = torch.zeros_like(case.o.view)
    states: list[list[Tensor]] = [[] for _ in case.lengths]
    options = {name: case.options[name] for name in OPTIONS if name in case.options}
    for t in range(max(case.lengths, default=0)):
        active = [n for n, length in enumerate(case.lengths) if length > t]
        index = case.cu_seqlens[active].long() + t
        o_t = torch.full_like(o[index], torch.nan)
        decode.fused_recurrent_gdr_decode_fwd(
            case.q[index], case.k[index], case.v[index], case.a[index], case.b[index], case.A_log, case.dt_bias, slots,
            case.state_indices[active], o_t, **options,
        )  # fmt: skip
        o[index] = o_t
        for n in active:
            states[n].append(slots[case.state_indices[n]].clone())
    empty = slots.new_empty(0, *slots.shape[1:])
    return OneToken(o, [torch.stack(x) if x else empty for x in states], slots)


def expect_bits_of_verify(case: Case, evidence: Evidence) -> int:
    """Run verify on `case` and compare with decode; (request, head, token) steps compared."""
    case.run()
    for what, count in differences(case, decode_calls(case)).items():
        evidence.equal(f"{what}: elements by which verify and decode differ", count, 0)
    return sum(case.lengths) * case.v.shape[1]


#: what verify is called with, beside seeds and pools; the many requests are beyond the small tile
LOSSLESS: tuple[dict[str, Any], ...] = (
    {"T": (*range(1, 17), 0, 17, 33)},
    {"T": [3] * (most_requests_of_the_small_tile() + 2)},
    {"T": (12, 5, 9), "H": 1, "HV": 2, "use_qk_l2norm_in_kernel": False, "scale": 0.01},
)


@pytest.mark.costly
@pytest.mark.criterion("2.7")
@pytest.mark.parametrize("options", LOSSLESS, ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_calls_have_the_bits_of_lossless_verify(
    pool: torch.dtype, options: dict[str, Any], device: torch.device, evidence: Evidence
) -> None:
    steps = 0
    for seed in range(1 if device.type == "cpu" else 30):
        case = tame(verify_cases.make(pool=pool, seed=seed, lossless=True, device=device, **options))
        case.A_log[0] = -6.0  # one head that remembers
        steps += expect_bits_of_verify(case, evidence)
    evidence.at_least("(request, head, token) steps compared in a case", steps, 50)


#: commits, other shapes, gates and ranges
VARIANTS: tuple[dict[str, Any], ...] = (
    {"T": (12, 0, 20, 1), "disable_state_update": False, "tail": 3},
    {"T": (12, 5), "H": 1, "HV": 3, "V": 64, "pitched": True, "pool": torch.float16},
    {"T": (5, 16), "H": 2, "HV": 8, "V": 256, "gate": torch.float32, "bias": torch.bfloat16, "allow_neg_eigval": True},
    {"T": (2, 1, 2), "disable_state_update": False, "scale": 0.0},
)


@pytest.mark.criterion("2.7")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_bits_in_every_variant(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    for seed in range(2 if device.type == "cpu" else 30):
        case = verify_cases.make(seed=seed, lossless=True, device=device, **options)
        expect_bits_of_verify(case, evidence)


@pytest.mark.criterion("2.7")
@pytest.mark.parametrize("lossless", (False, True), ids=("default", "lossless"))
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_verify_of_one_token_has_the_bits_of_decode(
    pool: torch.dtype, lossless: bool, device: torch.device, evidence: Evidence
) -> None:
    border = most_requests_of_the_small_tile(pool=pool)
    for N in (1, 6, border, border + 1):
        for seed in range(1 if device.type == "cpu" else 30):
            case = verify_cases.make(
                N, 1, pool=pool, seed=seed, steps=1, cache_steps=1, lossless=lossless, disable_state_update=False,
                device=device,
            )  # fmt: skip
            expect_bits_of_verify(case, evidence)


@pytest.mark.criterion("2.8")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_two_runs_agree(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    for N in (5, most_requests_of_the_small_tile(pool=pool) + 3):
        for seed in range(2 if device.type == "cpu" else 100):
            first, second = (make(N, pool=pool, seed=seed, device=device) for _ in range(2))
            first.run()
            second.run()
            for name in ("o", "pool"):
                count = different(getattr(first, name).storage, getattr(second, name).storage)
                evidence.equal(f"{name}: elements by which two runs differ", count, 0)


def part_of(case: DecodeCase, rows: list[int]) -> DecodeCase:
    """The call of these requests alone, in this order, on the pool as it was made."""
    other = make(len(rows), slots=1, pool=case.pool.view.dtype, device=case.q.device)
    other.mixed = case.mixed[rows]
    other.q, other.k, other.v, other.a, other.b = (x[rows] for x in (case.q, case.k, case.v, case.a, case.b))
    other.A_log, other.dt_bias, other.read = case.A_log, case.dt_bias, case.read[rows]
    slots = case.pool.before.as_strided(case.pool.view.shape, case.pool.view.stride(), GUARD)
    other.pool = verify_cases.Buffer.make(slots)
    return other


@pytest.mark.criterion("2.8")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_a_request_has_the_same_bits_in_any_batch(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    """A batch in the large tile against parts of it, in other orders, in either tile."""
    border = most_requests_of_the_small_tile(pool=pool)
    N, compared = border + 5, 0
    for seed in range(1 if device.type == "cpu" else 20):
        whole = make(N, pool=pool, seed=seed, device=device)
        whole.run()
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
        for rows in (order[:1], order[1:3], order[3:12], order[:border], order[: border + 1], order[::-1]):
            part = part_of(whole, rows)
            part.run()
            slots = whole.read[rows].long()
            evidence.equal("o: elements that differ in another batch", different(part.o.view, whole.o.view[rows]), 0)
            count = different(part.pool.view[slots], whole.pool.view[slots])
            evidence.equal("states: elements that differ in another batch", count, 0)
            compared += len(rows)
    evidence.at_least("requests compared", compared, 40)
