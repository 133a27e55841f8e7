"""On an H200: ours beside vLLM's own Triton function, on the same tensors, in a CUDA graph that is replayed."""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from integration.vllm.paged import packed_decode, paged_update
from tests.gate_engine import Evidence
from tests.integration import frameworks
from tests.integration.vllm.cases import ROUNDING_GPU, Case, compare, expected, make, relative_l2

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]
FILE = "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """vLLM's function from the file of its wheel; all that the file needs of vLLM is Triton under two names."""
    triton = pytest.importorskip("triton")
    try:
        path = frameworks.folder("vllm-0.33.0") / FILE
    except frameworks.Absent as error:
        pytest.skip(str(error))
    names = types.ModuleType("vllm.triton_utils")
    names.triton, names.tl = triton, importlib.import_module("triton.language")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", names)
    spec = importlib.util.spec_from_file_location("vllm_fused_sigmoid_gating", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_sigmoid_gating_delta_rule_update


def copied(case: Case) -> Case:
    arguments = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.arguments.items()}
    return Case(arguments, case.lengths, case.free)


def refill(case: Case, other: Case) -> None:
    for name, x in case.arguments.items():
        if isinstance(x, Tensor):
            x.copy_(other.arguments[name])
    case.lengths, case.free = other.lengths, other.free


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    return graph


@pytest.mark.criterion("6.25")
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("columns", "H", "HV"), ((2, 2, 4), (4, 1, 3), (8, 2, 8), (12, 4, 8), (16, 2, 4)))
def test_verify_beside_theirs(
    columns: int, H: int, HV: int, pool: torch.dtype, theirs: Callable[..., Any], evidence: Evidence
) -> None:
    """A graph of ours, replayed on new tokens, states, slots, lengths and acceptance; theirs on the same, eagerly."""
    N, draw = 5, random.Random(columns)
    options: dict[str, Any] = {"pool": pool, "H": H, "HV": HV, "device": "cuda"}
    case = make([columns] * N, [1] * N, columns, **options)
    out: list[Tensor] = []
    graph = captured(lambda: out.append(paged_update(**case.arguments)[0]))
    for seed in range(3):
        lengths = [columns, *(draw.randint(0 if seed else columns, columns) for _ in range(N - 1))]
        accepted = [draw.randint(1, columns) for _ in range(N)]
        padded = (3,) if seed == 2 else ()
        tail = columns * N - sum(lengths)
        refill(case, make(lengths, accepted, columns, padded=padded, tail=tail, seed=seed, **options))
        other, before, (want_o, want_pool, written) = copied(case), case.pool.cpu(), expected(case)
        graph.replay()
        their_o, _ = theirs(**other.arguments)
        torch.cuda.synchronize()
        errors = compare(case, out[-1], want_o, want_pool, written, before)
        evidence.at_most("o: worst relative L2 of a row, to fp64", errors.o, 2 * ROUNDING_GPU[torch.bfloat16])
        evidence.at_most(f"states: worst relative L2 to fp64, {pool}", errors.states, ROUNDING_GPU[pool])
        evidence.equal("elements changed elsewhere", errors.touched, 0)
        evidence.equal("outputs of nobody that are not zero", errors.nobody, 0)
        rows, both = (want_o != 0).flatten(1).any(1), 2 * ROUNDING_GPU[torch.bfloat16]
        got, theirs_there = out[-1][0].cpu()[rows], their_o[0].cpu()[rows].double()
        evidence.at_most("o: relative L2 to theirs", relative_l2(got, theirs_there), both)
        near = relative_l2(case.pool.cpu()[written], other.pool.cpu()[written].double())
        evidence.at_most("states: relative L2 to theirs", near, both)
        evidence.equal(
            "slots that only one of the two changed",
            int(((case.pool.cpu() != before) ^ (other.pool.cpu() != before))[~written].sum()), 0,
        )  # fmt: skip


@pytest.mark.criterion("6.25")
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
def test_decode_beside_theirs(pool: torch.dtype, theirs: Callable[..., Any], evidence: Evidence) -> None:
    """One-dimensional indices, through both of the functions that vLLM decodes with."""
    case = make([1] * 6, None, padded=(4,), pool=pool, H=2, HV=6, device="cuda")
    rows, packed = copied(case), copied(case)
    x = packed.arguments
    mixed = torch.cat([x[name][0].flatten(1) for name in ("q", "k", "v")], dim=1)
    out = torch.full((6, 1, *x["v"].shape[2:]), float("nan"), dtype=torch.bfloat16, device="cuda")
    before, first = case.pool.clone(), packed.pool.clone()
    results: list[Tensor] = []

    def ours() -> None:
        results.append(paged_update(**case.arguments)[0])
        packed_decode(
            mixed, x["a"], x["b"], x["A_log"], x["dt_bias"], 128**-0.5, packed.pool, out, x["ssm_state_indices"], True
        )

    graph = captured(ours)
    case.pool.copy_(before)
    packed.pool.copy_(first)
    graph.replay()
    their_o, _ = theirs(**rows.arguments)
    torch.cuda.synchronize()
    want_o, want_pool, written = expected(Case(case.arguments | {"initial_state": before}, case.lengths, case.free))
    real = (want_o != 0).flatten(1).any(1)
    for name, o, states in (("update", results[-1][0], case), ("packed", out[:, 0], packed)):
        errors = compare(states, o[None], want_o, want_pool, written, before.cpu())
        evidence.at_most(f"{name}: o to fp64", errors.o, 2 * ROUNDING_GPU[torch.bfloat16])
        evidence.at_most(f"{name}: states to fp64, {pool}", errors.states, ROUNDING_GPU[pool])
        evidence.equal(f"{name}: elements changed elsewhere", errors.touched, 0)
        both = 2 * ROUNDING_GPU[torch.bfloat16]
        evidence.at_most(f"{name}: o to theirs", relative_l2(o.cpu()[real], their_o[0].cpu()[real].double()), both)
        evidence.at_most(
            f"{name}: states to theirs",
            relative_l2(states.pool.cpu()[written], rows.pool.cpu()[written].double()), both,
        )  # fmt: skip
