"""Gate 4 on the hardware: graphs, allocation, the emulator against the GPU, bits at the shapes that are served."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime, verify
from tests.gate_engine import Evidence
from tests.launch import emulate
from tests.prepass import cases as prepass_cases
from tests.prepass.cases import OUTPUTS, SMALLEST, U, allowed
from tests.prepass.test_values import extreme_gates, odd_vectors
from tests.shapes import HEADS, POOLS
from tests.verify.cases import Case, check, make
from tests.verify.one_token import different
from tests.verify.test_gpu import refill

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


def low_level(case: Case, of: prepass_cases.Case) -> None:
    """Verify on what `of` left in its outputs."""
    g, beta, q_inv_norm, k_inv_norm = (buffer.view for buffer in of.outputs)
    verify.fused_recurrent_gdr_verify_fwd(
        case.q, case.k, case.v, g, beta, case.pool.view, case.state_indices, case.cu_seqlens, case.o.view,
        case.states.view, case.rows, q_inv_norm=q_inv_norm, k_inv_norm=k_inv_norm,
    )  # fmt: skip


def pair(**options: Any) -> tuple[Case, prepass_cases.Case]:
    """A verify, and the prepass of its inputs."""
    case = make(device="cuda", **options)
    of = prepass_cases.make(len(case.q), case.q.shape[1], case.v.shape[1], device="cuda")
    of.q, of.k, of.a, of.b, of.A_log, of.dt_bias = case.q, case.k, case.a, case.b, case.A_log, case.dt_bias
    return case, of


@pytest.mark.criterion("4.13")
@pytest.mark.parametrize("name", ("random", "extreme gates", "odd vectors"))
def test_emulator_and_gpu(name: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    def random(device: str) -> prepass_cases.Case:
        return prepass_cases.make(100, device=device)

    made = {"random": random, "extreme gates": extreme_gates, "odd vectors": odd_vectors}[name]
    on_gpu, on_cpu = made("cuda"), made("cpu")
    on_gpu.run()
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    on_cpu.run()
    for output, gpu, cpu, units in zip(OUTPUTS, on_gpu.outputs, on_cpu.outputs, allowed(on_cpu), strict=True):
        x, y = gpu.view.cpu().double(), cpu.view.double()
        assert torch.equal(x.isinf(), y.isinf()), f"{output} is infinite in one of them"
        error = (x - y).abs() / (units * U * y.abs() + SMALLEST)
        worst = error[~y.isinf()].max().item()
        evidence.at_most(f"{output}: emulator against GPU, as a share of what each may differ from fp64", worst, 2)


@pytest.mark.criterion("4.14")
@pytest.mark.parametrize("commit", (False, True))
def test_graph_replay_sees_changes(commit: bool, evidence: Evidence) -> None:
    options: dict[str, Any] = {
        "steps": 16, "slots": 9, "disable_state_update": not commit, "prepass": True, "device": "cuda"
    }  # fmt: skip
    case = make(T=(16, 16, 16), **options)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        case.run()
    for seed, lengths in enumerate(((16, 16, 16), (12, 16, 3), (0, 1, 9))):
        other = make(T=lengths, tail=48 - sum(lengths), seed=seed + 10, **options)
        refill(case, other)
        graph.replay()
        torch.cuda.synchronize()
        other.run()
        for name in ("o", "states", "pool"):
            count = different(getattr(case, name).storage, getattr(other, name).storage)
            evidence.equal(f"{name}: elements by which a replay differs from a call", count, 0)
        check(other, evidence)


@pytest.mark.criterion("4.15")
def test_allocations_and_synchronisation(evidence: Evidence) -> None:
    case, of = pair(T=(12, 12))
    case.options["prepass"] = True
    of.run()
    low_level(case, of)
    case.run()
    torch.cuda.synchronize()

    def allocated() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        of.run()
        low_level(case, of)
        low = allocated() - before
        case.run()
        public = allocated() - before - low
    finally:
        torch.cuda.set_sync_debug_mode("default")
    evidence.equal("allocations in the low-level entries", low, 0)
    evidence.equal("allocations in the public call", public, 2)
    check(case, evidence)


@pytest.mark.criterion("4.16")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("N", (1, 8, 64))
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_bits_at_served_shapes(H: int, HV: int, N: int, pool: torch.dtype, evidence: Evidence) -> None:
    N = min(N, 2048 // HV)
    alone, behind = (
        make(N=N, T=12, H=H, HV=HV, pool=pool, seed=N, bias=torch.bfloat16, prepass=prepass, device="cuda")
        for prepass in (False, True)
    )
    alone.run()
    behind.run()
    for name in ("o", "states", "pool"):
        x, y = (getattr(case, name).storage for case in (alone, behind))
        evidence.equal(f"{name}: elements that differ behind a prepass", different(x, y), 0)
