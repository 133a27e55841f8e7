"""The program whose states go to slots of the pool: its generated CUDA on the emulator, or on a GPU if there is one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from integration.vllm.paged import paged_update
from kernels import runtime
from kernels.verify import paged_recurrent_gated_delta_rule_verify
from kernels.verify.plan import paged_plan
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.integration.vllm.cases import ROUNDING, ROUNDING_GPU, Case, make, measure
from tests.launch import mutate, watch
from tests.machine_code import without_spills

FACTS: tuple[dict[str, Any], ...] = (
    {},
    {"pool": "float16"},
    {"pool": "float32"},
    {"H": 1, "HV": 3, "V": 64},
    {"H": 1, "HV": 2, "V": 256},
    {"gate_dtype": "float32", "bias_dtype": "bfloat16", "l2norm": False},
    {"H": 16, "HV": 32},
)
USUAL = {"H": 2, "HV": 4, "K": 128, "V": 128, "pool": "bfloat16", "gate_dtype": "bfloat16"}
VARIANTS = tuple(paged_plan(**{**USUAL, "bias_dtype": "float32", "l2norm": True, **facts}) for facts in FACTS)


def draw(columns: int, N: int, seed: int, **options: Any) -> Case:
    chance = random.Random(seed)
    lengths = [columns, *(chance.randint(0, columns) for _ in range(N - 1))]
    accepted = [chance.randint(0, columns + 1) for _ in range(N)]
    return make(lengths, accepted, columns, padded=(1,), tail=2, seed=seed, **options)


def check(case: Case, machine: str, evidence: Evidence) -> None:
    limits, pool = ROUNDING if machine == "cpu" else ROUNDING_GPU, case.pool.dtype
    errors = measure(case)
    evidence.at_most("o: worst relative L2 of a row, to fp64", errors.o, 2 * limits[torch.bfloat16])
    evidence.at_most(f"states: worst relative L2, {pool}", errors.states, limits.get(pool, limits[torch.bfloat16]))
    evidence.equal("elements changed elsewhere", errors.touched, 0)
    evidence.equal("outputs of nobody that are not zero", errors.nobody, 0)


@pytest.mark.costly
@pytest.mark.criterion("6.26")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("columns", (1, 2, 5, 8, 12, 16))
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_values(columns: int, pool: torch.dtype, machine: str, evidence: Evidence) -> None:
    check(draw(columns, 4, columns, pool=pool, device=device(machine)), machine, evidence)


@pytest.mark.costly
@pytest.mark.criterion("6.26")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("shape", ((1, 3, 64), (1, 2, 256), (2, 8, 128)), ids=str)
def test_shapes(shape: tuple[int, int, int], machine: str, evidence: Evidence) -> None:
    H, HV, V = shape
    check(draw(6, 3, HV, H=H, HV=HV, V=V, device=device(machine)), machine, evidence)


@pytest.mark.criterion("6.26")
@pytest.mark.usefixtures("emulator")
def test_bulk_stores(machine: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large grids store by bulk copies from two buffers; here from the first CTA on. One program, whatever N is."""
    if machine == "cpu":
        usual = paged_plan

        def bulk(**facts: Any) -> runtime.Program:
            program = usual(**facts)
            return dataclasses.replace(program, config=dataclasses.replace(program.config, direct_up_to=0))

        with monkeypatch.context() as patch:
            patch.setattr("kernels.verify.paged_api.paged_plan", bulk)
            check(draw(12, 3, 3), machine, evidence)
    else:
        check(draw(12, 160, 3, device="cuda"), machine, evidence)
    launched = watch(monkeypatch)
    for N in (2, 3):
        paged_update(**draw(4, N + 1, N, device=device(machine)).arguments)
    evidence.equal("programs for other numbers of requests", len({program for program, _ in launched}), 1)


def device(machine: str) -> str:
    return "cpu" if machine == "cpu" else "cuda"


#: wrong kernels: a pattern of the generated source, and what is put there
MUTANTS: dict[str, tuple[str, str]] = {
    "the first state is one column late": (
        r"(row = max\(\(min\(accepted.+, COLUMNS\)) - 1\), 0\)",
        r"\1), 0) % COLUMNS",
    ),
    "null blocks are written": (r"\(lowest <= slot_\d+\) && ", ""),
    "a state goes to the next column": (r"condval_(\d+) = slots\[\(min\(", r"condval_\1 = slots[(1 + min("),
}


@pytest.mark.criterion("6.27")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("wrong", MUTANTS)
def test_wrong_kernels_are_caught(
    wrong: str, machine: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine != "cpu":
        pytest.skip("sources are changed for the emulator only")
    mutate(monkeypatch, *MUTANTS[wrong])
    case = make([4, 4, 4], [2, 1, 3], 5, padded=(1,), seed=8)
    case.arguments["ssm_state_indices"][2, 0] = 0  # a column without a slot
    errors = measure(case)
    seen = (errors.o > 0.02, errors.states > 0.02, errors.touched > 0, errors.nobody > 0)
    evidence.at_least("signs of it", sum(seen), 1)


@pytest.mark.costly
@pytest.mark.criterion("6.26")
@pytest.mark.parametrize("program", VARIANTS, ids=lambda program: program.label)
def test_machine_code(program: runtime.Program, evidence: Evidence) -> None:
    _, instructions = without_spills(program, 128, evidence)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 16)


@pytest.mark.criterion("6.26")
@pytest.mark.parametrize("sanitizer", ("thread", "address", "undefined"))
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, machine: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine != "cpu":
        pytest.skip("the sanitizers run on the emulator")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    paged_update(**draw(7, 3, 1).arguments)
    ((program, *given),) = calls
    report = sanitize.run(runtime.lower(program), tuple(given), sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


BAD: tuple[tuple[Callable[[dict[str, Any]], None], type[Exception], str], ...] = (
    (lambda x: x.update(slot_table=x["slot_table"].long()), TypeError, "slot_table has dtype torch.int64"),
    (lambda x: x.update(slot_table=x["slot_table"][:, :0]), ValueError, "slot_table has 0 columns, must have 1 to 16"),
    (lambda x: x.update(slot_table=x["slot_table"].repeat(1, 6)), ValueError, "18 columns, must have 1 to 16"),
    (lambda x: x.update(slot_table=x["slot_table"][:2]), ValueError, "slot_table has shape"),
    (lambda x: x.update(slot_table=x["slot_table"][:, :2]), ValueError, "3 tokens, slot_table has 2 columns"),
    (lambda x: x.update(slot_table=x["slot_table"].T.contiguous().T), ValueError, "slot_table has strides"),
    (lambda x: x.update(accepted_lengths=x["accepted_lengths"].float()), TypeError, "float32, must be torch.int32"),
    (lambda x: x.update(lowest_slot=-1), ValueError, "lowest_slot is -1, must be 0 or more"),
    (lambda x: x.update(ssm_states=x["ssm_states"][..., :64]), ValueError, "ssm_states has shape"),
)


@pytest.mark.criterion("6.26")
@pytest.mark.parametrize(("spoil", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_bad_input(
    spoil: Callable[[dict[str, Any]], None], error: type[Exception], text: str, evidence: Evidence
) -> None:
    x = make([3, 3, 2], [1, 2, 3], 3).arguments
    names = ("A_log", "a", "dt_bias", "q", "k", "v", "b")
    call = {name: x[name] for name in names} | {
        "ssm_states": x["initial_state"], "slot_table": x["ssm_state_indices"],
        "accepted_lengths": x["num_accepted_tokens"], "query_start_loc": x["cu_seqlens"], "lowest_slot": 1,
    }  # fmt: skip
    before = x["initial_state"].clone()
    spoil(call)
    with pytest.raises(error, match=text):
        paged_recurrent_gated_delta_rule_verify(**call)
    evidence.equal("elements of the pool that changed", int((x["initial_state"] != before).sum()), 0)
