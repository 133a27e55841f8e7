"""Gate 5 on the hardware: graphs, streams, allocation, served shapes, and the emulator against the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate
from tests.replay.cases import check, make, relative_l2, run
from tests.shapes import HEADS, POOLS
from tests.verify.one_token import different
from tests.verify.test_gpu import refill, ulps

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


@pytest.mark.criterion("5.18")
@pytest.mark.parametrize("N", (3, 70), ids=("few", "many"))
def test_graph_replay_sees_changes(N: int, evidence: Evidence) -> None:
    options: dict[str, Any] = {"slots": N + 6, "H": 4, "HV": 8, "device": "cuda"}
    case = make(N=N, T=16, **options)
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        run(case)
    for seed, start in enumerate(((16, 16, 16), (12, 16, 3), (0, 1, 9), (7, 0, 0))):
        lengths = [start[n % 3] for n in range(N)]
        other = make(T=lengths, tail=16 * N - sum(lengths), seed=seed + 10, **options)
        if seed == 2:
            other.state_indices[1] = -1
        refill(case, other)
        graph.replay()
        torch.cuda.synchronize()
        check(case, evidence)


@pytest.mark.criterion("5.18")
def test_it_runs_on_the_current_stream(evidence: Evidence) -> None:
    """Behind inputs that another stream is still waiting to write."""
    case, ready = make(T=(12, 5), device="cuda"), make(T=(12, 5), seed=1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        refill(case, ready)
        run(case)
    stream.synchronize()
    check(case, evidence)


@pytest.mark.criterion("5.18")
def test_no_allocation_and_no_synchronisation(evidence: Evidence) -> None:
    case = make(T=(12, 12), device="cuda")
    run(case)
    evidence.equal("allocations in a call", allocations(lambda: run(case)), 0)
    check(case, evidence)


@pytest.mark.criterion("5.9", "5.19")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("T", (4, 12, 16))
@pytest.mark.parametrize("N", (1, 8, 64))
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_served_shapes(H: int, HV: int, N: int, T: int, pool: torch.dtype, evidence: Evidence) -> None:
    N = min(N, 2048 // HV)  # keeps the fp64 result within a few GB
    case = make(N=N, T=T, H=H, HV=HV, pool=pool, seed=N + T, bias=torch.bfloat16, device="cuda")
    run(case)
    check(case, evidence)
    first = case.o.view.clone()
    run(case)
    evidence.equal("outputs that differ in a second run", different(case.o.view, first), 0)


VARIANTS: tuple[dict[str, Any], ...] = (
    *({"T": (12, 5), "pool": pool} for pool in (torch.bfloat16, torch.float16, torch.float32)),
    {"T": (12, 5), "use_qk_l2norm_in_kernel": False, "scale": 1e-3},
    {"T": (12, 5), "H": 1, "HV": 2, "gate": torch.float32, "bias": torch.bfloat16},
    {"T": (5, 16), "H": 1, "HV": 2, "V": 64},
    {"T": (5, 16), "H": 1, "HV": 2, "V": 256},
)


@pytest.mark.criterion("5.19")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_emulator_and_gpu(options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ in the last bits of exp, log1p and rsqrt and in the order of the tensor cores' sums."""
    on_gpu, on_cpu = make(device="cuda", **options), make(**options)
    if not options.get("use_qk_l2norm_in_kernel", True):
        on_gpu.k.mul_(1 / 16)  # near unit length, else the recurrence explodes
        on_cpu.k.mul_(1 / 16)
    run(on_gpu)
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    run(on_cpu)
    x, y = on_gpu.o.view.cpu(), on_cpu.o.view
    evidence.at_most("o: emulator against GPU, relative L2", relative_l2(x, y.double()), 5e-4)
    evidence.at_most("o: emulator against GPU, largest difference", ulps(x, y), 2, "ulp")
