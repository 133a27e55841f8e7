"""Gate 3 on the hardware: graphs, allocation, served shapes, and the emulator against the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import runtime, verify
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate
from tests.shapes import HEADS, POOLS
from tests.verify.cases import Buffer, Case, check, make, relative_l2

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


def low_level(case: Case) -> None:
    verify.fused_recurrent_gdr_verify_gated_fwd(
        case.q, case.k, case.v, case.a, case.b, case.A_log, case.dt_bias, case.pool.view, case.state_indices,
        case.cu_seqlens, case.o.view, case.states.view, case.rows, **case.options,
    )  # fmt: skip


def refill(case: Case, other: Case) -> None:
    """Give the buffers of `case` the contents of `other`, in place."""
    for field in dataclasses.fields(Case):
        mine, new = getattr(case, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor):
            mine.copy_(new)
        elif isinstance(mine, Buffer):
            mine.storage.copy_(new.storage)
            mine.before.copy_(new.before)


@pytest.mark.criterion("3.24")
@pytest.mark.parametrize("commit", (False, True))
def test_graph_replay_sees_changes(commit: bool, evidence: Evidence) -> None:
    options: dict[str, Any] = {"steps": 16, "slots": 9, "disable_state_update": not commit, "device": "cuda"}
    case = make(T=(16, 16, 16), **options)
    low_level(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        low_level(case)
    for seed, lengths in enumerate(((16, 16, 16), (12, 16, 3), (0, 1, 9), (7, 0, 0))):
        other = make(T=lengths, tail=48 - sum(lengths), seed=seed + 10, **options)
        if seed == 2:
            other.state_indices[1] = -1
        refill(case, other)
        graph.replay()
        torch.cuda.synchronize()
        check(case, evidence)


@pytest.mark.criterion("3.25")
def test_low_level_neither_allocates_nor_synchronises(evidence: Evidence) -> None:
    case = make(T=(12, 12), device="cuda")
    low_level(case)
    evidence.equal("allocations in a call", allocations(lambda: low_level(case)), 0)
    check(case, evidence)


@pytest.mark.criterion("3.26")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("T", (12, 16))
@pytest.mark.parametrize("N", (1, 8, 64))
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_served_shapes(H: int, HV: int, N: int, T: int, pool: torch.dtype, evidence: Evidence) -> None:
    if N * HV > 2048:
        N = 2048 // HV  # keeps the fp64 result within a few GB
    case = make(N=N, T=T, H=H, HV=HV, pool=pool, steps=16, seed=N + T, bias=torch.bfloat16, device="cuda")
    case.run()
    check(case, evidence)


def ulps(x: Tensor, y: Tensor) -> int:
    """Largest distance between x and y in units in the last place of their dtype.

    Over elements of at least a tenth of the root mean square: near zero, where terms cancel, units shrink but errors
    do not.
    """
    large = y.float().abs() >= 0.1 * y.float().square().mean().sqrt()
    x, y = x[large], y[large]
    width = {2: torch.int16, 4: torch.int32}[x.element_size()]

    def ordered(t: Tensor) -> Tensor:
        bits = t.contiguous().view(width).long()
        return torch.where(bits < 0, torch.iinfo(width).min - bits, bits)

    return int((ordered(x) - ordered(y)).abs().max())


VARIANTS: tuple[dict[str, Any], ...] = (
    *(
        {"T": lengths, "pool": pool, "disable_state_update": not commit}
        for lengths in ((12, 5), (33, 16))
        for pool in (torch.bfloat16, torch.float16, torch.float32)
        for commit in (False, True)
    ),
    {"T": (12, 5), "fuse_gating": False},
    {"T": (12, 5), "use_qk_l2norm_in_kernel": False, "scale": 1e-3},
    {"T": (12, 5), "gate": torch.float32, "bias": torch.bfloat16},
    {"T": (12, 5), "V": 64},
    {"T": (12, 5), "V": 256},
)


@pytest.mark.criterion("3.23")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_emulator_and_gpu(options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ in the last bits of exp, log1p and rsqrt and in the order of the tensor cores' sums."""
    options = {"H": 1, "HV": 2, **options}
    on_gpu, on_cpu = make(device="cuda", **options), make(**options)
    if not options.get("use_qk_l2norm_in_kernel", True):
        on_gpu.k.mul_(1 / 16)  # near unit length, else the recurrence explodes
        on_cpu.k.mul_(1 / 16)
    on_gpu.run()
    monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    on_cpu.run()
    name = str(on_cpu.pool.view.dtype)[6:]
    stored = ~on_cpu.states.view.isnan()
    for what, x, y in (
        ("o", on_gpu.o.view.cpu(), on_cpu.o.view),
        (f"{name} states", on_gpu.states.view.cpu()[stored], on_cpu.states.view[stored]),
        (f"{name} pool", on_gpu.pool.view.cpu(), on_cpu.pool.view),
    ):
        # 16 bits hide all but a changed rounding here and there; 4096 units of fp32 are 5e-5 of the RMS
        limit, largest = (1e-6, 4096) if x.dtype == torch.float32 else (5e-4, 2)
        evidence.at_most(f"{what}: emulator against GPU, relative L2", relative_l2(x, y.double()), limit)
        evidence.at_most(f"{what}: emulator against GPU, largest difference", ulps(x, y), largest, "ulp")
