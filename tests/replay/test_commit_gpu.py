"""Gate 5, commit on the hardware: graphs, streams, allocation, served shapes, and the emulator against the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate
from tests.replay import cases
from tests.replay.commit_cases import Commit, again, check_commit, elsewhere, make, relative_l2, run
from tests.shapes import HEADS, POOLS
from tests.verify.one_token import different
from tests.verify.test_gpu import refill, ulps

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


def restore(case: Commit) -> None:
    """The pool as it was before the first call."""
    case.pool.storage.copy_(case.pool.before)


def refill_commit(case: Commit, other: Commit) -> None:
    """Give the buffers of `case` the contents of `other`, in place."""
    refill(case, other)
    case.accepted.copy_(other.accepted)
    if case.targets is not None and other.targets is not None:
        case.targets.copy_(other.targets)


@pytest.mark.criterion("5.28")
@pytest.mark.parametrize("moved", (False, True), ids=("in place", "moved"))
@pytest.mark.parametrize("N", (3, 70), ids=("few", "many"))
def test_graph_replay_sees_changes(N: int, moved: bool, evidence: Evidence) -> None:
    options: dict[str, Any] = {"slots": 2 * N + 6, "H": 4, "HV": 8, "steps": 16, "device": "cuda"}
    case = make([16] * N, 16, **options)
    if moved:
        elsewhere(case)
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        run(case)
    starts = ((16, 16, 16), (12, 16, 3), (0, 1, 9), (7, 0, 0))
    for seed, (start, first) in enumerate(zip(starts, ((16, 0, 5), (12, 3, 0), (0, 1, 20), (-1, 0, 0)), strict=True)):
        lengths, accepted = [start[n % 3] for n in range(N)], [first[n % 3] for n in range(N)]
        other = make(accepted, lengths, tail=16 * N - sum(lengths), seed=seed + 10, **options)
        if moved:
            elsewhere(other)
        if seed == 2:
            other.state_indices[1] = -1
        refill_commit(case, other)
        graph.replay()
        torch.cuda.synchronize()
        check_commit(case, evidence)


@pytest.mark.criterion("5.28")
def test_it_runs_on_the_current_stream(evidence: Evidence) -> None:
    """Behind inputs that another stream is still waiting to write."""
    options: dict[str, Any] = {"device": "cuda"}
    case, ready = make((12, 3), (12, 5), **options), make((7, 5), (12, 5), seed=1, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        refill_commit(case, ready)
        run(case)
    stream.synchronize()
    check_commit(case, evidence)


@pytest.mark.criterion("5.28")
@pytest.mark.parametrize("moved", (False, True), ids=("in place", "moved"))
def test_no_allocation_and_no_synchronisation(moved: bool, evidence: Evidence) -> None:
    case = make((12, 4), 12, slots=6, device="cuda")
    if moved:
        elsewhere(case)
    run(case)
    restore(case)
    evidence.equal("allocations in a call", allocations(lambda: run(case)), 0)
    check_commit(case, evidence)


@pytest.mark.criterion("5.28")
@pytest.mark.parametrize("N", (3, 70), ids=("few", "many"))
def test_launches_in_a_row_see_each_other(N: int, evidence: Evidence) -> None:
    """A launch may begin before the one ahead of it has ended: calls in a row give the bits of calls with a wait after
    each of them."""
    waiting = make([1 + n % 12 for n in range(N)], 12, H=4, HV=8, device="cuda")
    in_a_row = again(waiting)
    found = []
    for case, wait in ((waiting, True), (in_a_row, False)):
        outputs = []
        for _ in range(5):
            outputs.append(cases.run(case).clone())
            if wait:
                torch.cuda.synchronize()
            run(case)
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append((torch.stack(outputs), case.pool.view))
    for what, x, y in zip(("outputs", "states"), *found, strict=True):
        evidence.equal(f"{what} that differ without waits", different(x, y), 0)
    assert in_a_row.pool.changed().any()


@pytest.mark.criterion("5.28")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("T", (4, 12, 16))
@pytest.mark.parametrize("N", (1, 8, 64))
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_served_shapes(H: int, HV: int, N: int, T: int, pool: torch.dtype, evidence: Evidence) -> None:
    N = min(N, 2048 // HV)  # keeps the fp64 result within a few GB
    accepted = [T - n % (T + 1) for n in range(N)]
    case = make(accepted, T, H=H, HV=HV, pool=pool, seed=N + T, bias=torch.bfloat16, device="cuda")
    run(case)
    check_commit(case, evidence)
    first = case.pool.view.clone()
    restore(case)
    run(case)
    evidence.equal("elements that differ in a second run", different(case.pool.view, first), 0)


VARIANTS: tuple[dict[str, Any], ...] = (
    *({"T": (12, 5), "pool": pool} for pool in (torch.bfloat16, torch.float16, torch.float32)),
    {"T": (12, 5), "use_qk_l2norm_in_kernel": False},
    {"T": (12, 5), "H": 1, "HV": 2, "gate": torch.float32, "bias": torch.bfloat16},
    {"T": (5, 16), "H": 1, "HV": 2, "V": 64},
    {"T": (5, 16), "H": 1, "HV": 2, "V": 256},
)


@pytest.mark.criterion("5.28")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_emulator_and_gpu(options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ in the last bits of exp, log1p and rsqrt and in the order of the tensor cores' sums."""
    on_gpu, on_cpu = make((10, 5), device="cuda", **options), make((10, 5), **options)
    if not options.get("use_qk_l2norm_in_kernel", True):
        on_gpu.k.mul_(1 / 16)  # near unit length, else the recurrence explodes
        on_cpu.k.mul_(1 / 16)
    run(on_gpu)
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    run(on_cpu)
    x, y = on_gpu.pool.view.cpu(), on_cpu.pool.view
    # 16 bits hide all but a changed rounding here and there; 4096 units of fp32 are 5e-5 of the RMS
    limit, largest = (1e-6, 4096) if x.dtype == torch.float32 else (5e-4, 2)
    name = f"{str(x.dtype)[6:]} pool: emulator against GPU"
    evidence.at_most(f"{name}, relative L2", relative_l2(x, y.double()), limit)
    evidence.at_most(f"{name}, largest difference", ulps(x, y), largest, "ulp")
