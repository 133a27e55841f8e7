"""Gate 5, the ring on the hardware: graphs, streams, allocation, served shapes, and the emulator against the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import runtime
from kernels.replay import ring
from tests.gate_engine import Evidence
from tests.launch import allocations, emulate
from tests.replay.ring_cases import KEPT, Call, Server, Tokens, relative_l2, same
from tests.shapes import HEADS, POOLS
from tests.verify.cases import Buffer
from tests.verify.one_token import different
from tests.verify.test_gpu import ulps

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


class Captured:
    """Buffers of a verify and an accept that a graph reads: one size, any contents."""

    def __init__(self, server: Server, NT: int) -> None:
        N = len(server.slots)
        self.server, self.inputs = server, server.tokens(NT)
        unset = torch.full_like(self.inputs.v, torch.nan, memory_format=torch.contiguous_format)
        self.o = Buffer.make(unset, (8,) if server.pitched else ())
        self.slots, self.starts = server.indices([-1] * N), server.indices([0] * (N + 1))
        self.accepted = server.indices([0] * N)

    def verify(self) -> None:
        server, x = self.server, self.inputs
        ring.verify(
            server.A_log, x.a, server.dt_bias, x.q, x.k, x.v, x.b, server.pool.view, self.slots, self.starts,
            server.window, o=self.o.view, **server.options,
        )  # fmt: skip

    def accept(self) -> None:
        ring.accept(self.server.window, self.slots, self.accepted)

    def both(self) -> None:
        self.verify()
        self.accept()

    def take(self, other: Captured) -> None:
        """The contents of the inputs of another one."""
        for name in ("q", *KEPT):
            getattr(self.inputs, name).copy_(getattr(other.inputs, name))
        for name in ("slots", "starts", "accepted"):
            getattr(self, name).copy_(getattr(other, name))

    def fill(self, slots: list[int], lengths: list[int], accepted: list[int], inputs: Tokens) -> Call:
        """What the next calls find; returns what `Server.check` needs to know, of now."""
        server, window = self.server, self.server.window
        for name in ("q", *KEPT):
            getattr(self.inputs, name).copy_(getattr(inputs, name))
        starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        self.o.view.fill_(torch.nan)
        for buffer, values in ((self.slots, slots), (self.starts, starts), (self.accepted, accepted)):
            buffer.copy_(server.indices(values))
        kept = {name: getattr(window, name).clone() for name in KEPT}
        return Call(
            slots, starts, inputs, self.o, server.pool.view.clone(), window.cursors.clone(), kept, window.marks.clone()
        )


def check_after_accept(server: Server, call: Call, accepted: list[int], evidence: Evidence) -> None:
    """`Server.check` and `Server.accept` of a call whose accept has already run."""
    moved = server.window.cursors.clone()
    server.window.cursors.copy_(call.cursors)
    server.check(call, evidence)
    server.window.cursors.copy_(moved)
    for n, (slot, L) in enumerate(zip(call.slots, accepted, strict=True)):
        if server.is_slot(slot):
            server.record(slot, call.inputs[call.of(n)][:L])
    server.check_cursors()


@pytest.mark.criterion("5.36")
@pytest.mark.parametrize("T", (1, 12))
@pytest.mark.parametrize("N", (3, 70), ids=("few", "many"))
def test_graph_of_verify_and_accept(N: int, T: int, evidence: Evidence) -> None:
    """Many steps of one graph: other inputs, lengths, slots, numbers of accepted tokens; folds come up and pass."""
    server = Server(N=N, slots=N + 4, max_tokens=T, H=4, HV=8, capacity=8, device="cuda")
    captured = Captured(server, N * T)
    captured.both()  # of padding alone: compiles, moves nothing
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        captured.both()
    for step in range(20 if T == 1 else 8):
        order = torch.randperm(N, generator=server.rng).tolist()
        slots = [server.slots[n] for n in order]
        lengths = [T] * N if T == 1 else server.lengths()
        accepted = server.some_of(lengths) if step % 4 else lengths
        if step == 2:
            slots[1] = -1
        call = captured.fill(slots, lengths, accepted, server.tokens(N * T))
        graph.replay()
        torch.cuda.synchronize()
        check_after_accept(server, call, accepted, evidence)
    evidence.at_least("folds in the replays", server.folds, N)


@pytest.mark.criterion("5.36")
def test_steps_in_a_row_without_waits(evidence: Evidence) -> None:
    """A launch may begin before the one ahead of it has ended: verify and accept in turns, in a stream and in a graph,
    give the bits of calls with a wait after each of them."""
    for N in (3, 70):
        found = []
        for how in ("waits", "stream", "graph"):
            server = Server(N=N, max_tokens=4, H=4, HV=8, capacity=5, device="cuda")
            each = [Captured(server, 4 * N) for _ in range(6)]
            for step, captured in enumerate(each):
                accepted = [(n + step) % 5 for n in range(N)]
                captured.fill(server.slots, [4] * N, accepted, server.tokens(4 * N))
            torch.cuda.synchronize()
            if how == "graph":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                    for captured in each:
                        captured.both()
                graph.replay()
            for captured in each if how != "graph" else ():
                captured.verify()
                if how == "waits":
                    torch.cuda.synchronize()
                captured.accept()
                if how == "waits":
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            outputs = torch.stack([captured.o.view for captured in each])
            found.append((outputs, server.pool.view, server.window.cursors, server.window.marks))
        for other in found[1:]:
            for what, x, y in zip(("outputs", "states"), other[:2], found[0][:2], strict=True):
                evidence.equal(f"{what} that differ without waits, N = {N}", different(x, y), 0)
            assert same(other[2], found[0][2]) and same(other[3], found[0][3])
        assert int(found[0][2][:, 3].sum()) >= N and found[0][0].isfinite().all()


@pytest.mark.criterion("5.36")
def test_it_runs_on_the_current_stream(evidence: Evidence) -> None:
    """Behind inputs that another stream is still waiting to write."""
    server = Server(N=2, max_tokens=12, capacity=4, device="cuda")
    for _ in range(2):
        server.step([12, 12], accept=False)
        server.accept([12, 1])
    captured, ready = Captured(server, 17), Captured(server, 17)
    lengths, accepted = [12, 5], [12, 5]
    call = ready.fill(server.slots, lengths, accepted, server.tokens(17))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        captured.take(ready)
        captured.both()
    stream.synchronize()
    check_after_accept(server, dataclasses.replace(call, o=captured.o), accepted, evidence)


@pytest.mark.criterion("5.36")
def test_no_allocation_and_no_synchronisation(evidence: Evidence) -> None:
    """Of verify with o given, and of accept; reset and flush allocate, and do not synchronise."""
    server = Server(N=2, max_tokens=12, capacity=4, device="cuda")
    captured = Captured(server, 24)
    for step in range(4):
        accepted = [12, step]
        call = captured.fill(server.slots, [12, 12], accepted, server.tokens(24))
        if step == 0:
            captured.both()
        else:
            evidence.equal("allocations in verify and accept", allocations(captured.both), 0)
        check_after_accept(server, call, accepted, evidence)
    evidence.at_least("folds", server.folds, 4)

    def others() -> None:
        ring.flush(server.A_log, server.dt_bias, server.pool.view, captured.slots, server.window)
        ring.reset(server.window, captured.slots)

    others()
    allocations(others)
    assert not server.window.cursors[:, 1:3].any()


def ends(T: int) -> list[tuple[int, int, int]]:
    """(N, T, steps) of served shapes: 40 of a decode, in which 16 tokens are folded twice."""
    return [(N, T, 40 if T == 1 else 5) for N in (1, 8, 64)]


@pytest.mark.criterion("5.36")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize(("N", "T", "steps"), [row for T in (1, 4, 12, 16) for row in ends(T)])
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_served_shapes(H: int, HV: int, N: int, T: int, steps: int, pool: torch.dtype, evidence: Evidence) -> None:
    """Folds of all requests at once in a decode, of other ones in every step in all else."""
    N = min(N, 2048 // HV)  # keeps the fp64 results within seconds
    server = Server(
        N=N, slots=N + 1, max_tokens=T, capacity=16 if T == 1 else T, H=H, HV=HV, pool=pool, bias=torch.bfloat16,
        seed=N + T, device="cuda",
    )  # fmt: skip
    checked = 0
    for step in range(steps):
        call = server.call([T] * N)
        due = sum(server.records[slot].pending for slot in server.slots)
        if due or step in (0, 3, 20):
            server.check(call, evidence)
            checked += due
        server.accept([T - (n + step) % (T + 1) if T > 1 else 1 for n in range(N)])
        server.forget()
    evidence.at_least("folded states that were compared", checked, N)


VARIANTS: tuple[dict[str, Any], ...] = (
    *({"pool": pool} for pool in (torch.bfloat16, torch.float16, torch.float32)),
    {"H": 1, "HV": 3, "V": 64, "gate": torch.float32, "bias": torch.bfloat16},
    {"H": 1, "HV": 2, "V": 256, "use_qk_l2norm_in_kernel": False},
)


@pytest.mark.criterion("5.36")
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_emulator_and_gpu(options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two differ in the last bits of exp, log1p and rsqrt and in the order of the tensor cores' sums. Every step
    starts from what the GPU left."""
    monkeypatch.setattr(runtime, "cpu_launcher", None)
    on_gpu = Server(max_tokens=6, capacity=7, device="cuda", **options)
    on_cpu = Server(max_tokens=6, capacity=7, **options)
    for step in range(4):
        lengths, inputs = [6, 4, 1 + step], on_gpu.tokens(11 + step)
        on_cpu.pool.view.copy_(on_gpu.pool.view)
        for name in (*KEPT, "cursors", "marks"):
            getattr(on_cpu.window, name).copy_(getattr(on_gpu.window, name))
        x = on_gpu.call(lengths, inputs).o.view
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "cpu_launcher", emulate)
            y = on_cpu.call(lengths, Tokens(*(getattr(inputs, name).cpu() for name in ("q", *KEPT)))).o.view
        compare("o", x.cpu(), y, evidence)
        compare("pool", on_gpu.pool.view.cpu(), on_cpu.pool.view, evidence)
        assert same(on_gpu.window.marks.cpu(), on_cpu.window.marks)
        assert all(same(getattr(on_gpu.window, name).cpu(), getattr(on_cpu.window, name)) for name in KEPT)
        on_gpu.accept([6, 2, 1])
    assert on_gpu.folds


def compare(name: str, x: Tensor, y: Tensor, evidence: Evidence) -> None:
    # 16 bits hide all but a changed rounding here and there; 4096 units of fp32 are 5e-5 of the RMS
    limit, largest = (1e-6, 4096) if x.dtype == torch.float32 else (5e-4, 2)
    name = f"{name} in {str(x.dtype)[6:]}: emulator against GPU"
    evidence.at_most(f"{name}, relative L2", relative_l2(x, y.double()), limit)
    evidence.at_most(f"{name}, largest difference", ulps(x, y), largest, "ulp")
