"""Gate 2, paged decode on the hardware: graphs, allocation, served shapes, large pools; emulator against GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode, runtime
from tests.decode.cases import DecodeCase, check, make, set_slots
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate
from tests.shapes import HEADS, POOLS
from tests.verify.cases import Buffer, relative_l2
from tests.verify.one_token import different
from tests.verify.test_gpu import ulps

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


def low_level(case: DecodeCase) -> None:
    decode.fused_recurrent_gdr_decode_fwd(
        case.q, case.k, case.v, *case.gates, case.pool.view, case.read, case.o.view, case.write, **case.options
    )


#: the ways to call, with o given
CALLS: tuple[Callable[[DecodeCase], None], ...] = (low_level, DecodeCase.run_packed)


def refill(case: DecodeCase, other: DecodeCase) -> None:
    """Give the buffers of `case` the contents of `other`, in place."""
    for field in dataclasses.fields(DecodeCase):
        mine, new = getattr(case, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor):
            mine.copy_(new)
        elif isinstance(mine, Buffer):
            mine.storage.copy_(new.storage)
            mine.before.copy_(new.before)


@pytest.mark.criterion("2.9")
@pytest.mark.parametrize("call", CALLS, ids=("separate", "packed"))
@pytest.mark.parametrize("moves", (False, True), ids=("in place", "moves"))
@pytest.mark.parametrize("N", (5, 40))
def test_graph_replay_sees_changes(N: int, moves: bool, call: Callable[[DecodeCase], None], evidence: Evidence) -> None:
    options: dict[str, Any] = {"slots": 2 * N + 6, "moves": moves, "device": "cuda"}
    case = make(N, **options)
    call(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case)
    for seed in range(5):
        other = make(N, seed=seed + 10, **options)
        if seed % 2:
            set_slots(other.read, -1, 2 * N + 6, 2**31 - 1)
            other.mixed[:3] = torch.nan
        refill(case, other)
        graph.replay()
        torch.cuda.synchronize()
        check(case, evidence)
        other.run()
        for name in ("o", "pool"):
            count = different(getattr(case, name).storage, getattr(other, name).storage)
            evidence.equal(f"{name}: elements by which a replay differs from a call", count, 0)


@pytest.mark.criterion("2.9")
def test_a_graph_of_many_steps(evidence: Evidence) -> None:
    """Sixteen steps in one graph, each on what the one before it stored: programmatic launches keep their order."""
    N, steps = 40, 16
    cases = [make(N, seed=seed, device="cuda") for seed in range(steps)]
    chained = [dataclasses.replace(case, pool=cases[0].pool, read=cases[0].read) for case in cases]
    low_level(chained[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in chained:
            low_level(case)
    for _ in range(20):
        cases[0].pool.storage.copy_(cases[0].pool.before)
        graph.replay()
    torch.cuda.synchronize()
    got, outputs = cases[0].pool.storage.clone(), [case.o.view.clone() for case in chained]
    cases[0].pool.storage.copy_(cases[0].pool.before)
    for case, o in zip(chained, outputs, strict=True):
        low_level(case)
        torch.cuda.synchronize()
        evidence.equal("o: elements by which steps in a graph differ from single ones", different(case.o.view, o), 0)
    evidence.equal("pool: likewise", different(cases[0].pool.storage, got), 0)


@pytest.mark.criterion("2.9")
@pytest.mark.parametrize("call", CALLS, ids=("separate", "packed"))
@pytest.mark.parametrize("moves", (False, True), ids=("in place", "moves"))
def test_neither_allocates_nor_synchronises(
    moves: bool, call: Callable[[DecodeCase], None], evidence: Evidence
) -> None:
    """A first call of its sizes, whose program is compiled, and a known one."""
    call(make(3, moves=moves, device="cuda"))
    case = make(7, moves=moves, pitched=True, device="cuda")
    for kind in ("first", "known"):
        case.pool.storage.copy_(case.pool.before)
        evidence.equal(f"allocations in a {kind} call", allocations(lambda: call(case)), 0)
        check(case, evidence)


@pytest.mark.criterion("2.9")
def test_runs_on_the_current_stream(evidence: Evidence) -> None:
    """Work queued before it on a side stream, and after it, keeps its order there."""
    case, other = make(40, device="cuda"), make(40, seed=1, device="cuda")
    low_level(make(40, device="cuda"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        refill(case, other)
        low_level(case)
        after = case.pool.storage.clone()
    stream.synchronize()
    check(case, evidence)
    evidence.equal("elements that a copy behind the call does not see", different(after, case.pool.storage), 0)


@pytest.mark.criterion("2.1")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("N", (1, 8, 64, 300))
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_served_shapes(H: int, HV: int, N: int, pool: torch.dtype, evidence: Evidence) -> None:
    if N * HV > 4096:
        N = 4096 // HV  # keeps the fp64 result within a few GB
    case = make(N, H, HV, pool=pool, seed=N, bias=torch.bfloat16, device="cuda")
    case.run()
    check(case, evidence)


@pytest.mark.criterion("2.3")
@pytest.mark.parametrize("moves", (False, True), ids=("in place", "moves"))
def test_a_pool_beyond_2_31_elements(moves: bool, evidence: Evidence) -> None:
    """Slots whose offsets need more than 32 bits: the first, the last, and those around 2^31 and 2^32 elements."""
    HV, V, K = 4, 128, 128
    size = HV * V * K
    slots = 2**32 // size + 70
    pool = torch.zeros(slots, HV, V, K, dtype=torch.bfloat16, device="cuda")
    border, wrap = 2**31 // size, 2**32 // size
    at = [0, 1, border - 1, border, border + 1, wrap - 1, wrap, wrap + 1, slots - 2, slots - 1]
    case = make(5, device="cuda", slots=len(at))
    pool[at] = case.pool.view
    # the case in small has slot i where the large pool has slot at[i]
    set_slots(case.read, 9, 0, 2, 4, 6)
    if moves:
        case.write = torch.tensor([3, 5, 7, 8, 1], dtype=torch.int32, device="cuda")
    large = dataclasses.replace(case, pool=Buffer(pool, pool, pool))
    index = torch.tensor(at, dtype=torch.int32, device="cuda")
    large.read = index[case.read.long()]
    large.write = index[case.write.long()] if case.write is not None else None
    low_level(large)
    case.pool.view.copy_(pool[at])
    check(case, evidence)
    pool[at] = 0
    evidence.equal("elements of other slots that changed", int(pool.view(torch.int64).count_nonzero()), 0)


VARIANTS: tuple[dict[str, Any], ...] = (
    {"N": 5},
    {"N": 5, "pool": torch.float16, "moves": True},
    {"N": 40, "pool": torch.float32},
    {"N": 5, "use_qk_l2norm_in_kernel": False, "scale": 1e-3},
    {"N": 5, "gate": torch.float32, "bias": torch.bfloat16, "pitched": True},
    {"N": 5, "V": 64},
    {"N": 40, "V": 256},
)


@pytest.mark.criterion("2.1")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_emulator_and_gpu(options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ in the last bits of exp, log1p and rsqrt only."""
    on_gpu, on_cpu = make(device="cuda", **options), make(**options)
    on_gpu.run()
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    on_cpu.run()
    name = str(on_cpu.pool.view.dtype)[6:]
    for what, x, y in (
        ("o", on_gpu.o.view.cpu(), on_cpu.o.view),
        (f"{name} pool", on_gpu.pool.view.cpu(), on_cpu.pool.view),
    ):
        # 16 bits hide all but a changed rounding here and there; 4096 units of fp32 are 5e-5 of the RMS
        limit, largest = (1e-6, 4096) if x.dtype == torch.float32 else (5e-4, 2)
        evidence.at_most(f"{what}: emulator against GPU, relative L2", relative_l2(x, y.double()), limit)
        evidence.at_most(f"{what}: emulator against GPU, largest difference", ulps(x, y), largest, "ulp")


@pytest.mark.criterion("2.8")
def test_many_random_calls_repeat(evidence: Evidence) -> None:
    """Runs beside other work on the GPU repeat bit for bit, and so do batches of other sizes."""
    compared = 0
    for seed in range(100):
        N = 1 + seed * 7 % 90
        first, second = (make(N, seed=seed, pitched=seed % 2 == 1, device="cuda") for _ in range(2))
        low_level(first)
        low_level(second)
        for name in ("o", "pool"):
            count = different(getattr(first, name).storage, getattr(second, name).storage)
            evidence.equal(f"{name}: elements by which two runs differ", count, 0)
        compared += N
    evidence.at_least("requests compared", compared, 1000)
