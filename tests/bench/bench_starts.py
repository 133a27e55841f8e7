"""What a call costs beside its device time: host time, memory, and the wait of a new process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import machine as machine_facts
from tests.bench import timing
from tests.bench.implementation import Implementation, Unsupported
from tests.bench.ours import ours
from tests.bench.peers import peers
from tests.bench.problem import Problem, Shape
from tests.bench.session import Session
from tests.bench.start import first_call_in_new_process

if machine_facts.kind() != "sm90":
    pytest.skip("needs a Hopper GPU: no speed is measured here", allow_module_level=True)

OPS = ("verify-snapshots", "decode")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        # a peer in a process of its own is left out: there its wrapper finds kernels where it would compile them
        offered = [*ours(), *peers(seed_checkout=metafunc.config.getoption("--seed-checkout"))]
        cases = [(op, i) for op in OPS for i in offered if op in i.ops and not hasattr(i, "remote")]
        metafunc.parametrize(("op", "implementation"), cases, ids=[f"{op} {i.name}" for op, i in cases])


def test_one_call(op: str, implementation: Implementation, speed: Session) -> None:
    """Host time and additional peak memory of one eager call at N = 1 and 64."""
    if absent := implementation.absent():
        pytest.skip(absent)
    for N in (1, 64):
        shape = Shape(op, N, 12 if op == "verify-snapshots" else 1, cold=False)
        problem = Problem(shape, speed.device, l2_bytes=1)
        try:
            bound = implementation.bind(problem)
        except Unsupported as reason:
            pytest.skip(str(reason))
        bound.launch(0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        bound.launch(0)
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        where = f"{op}, N = {N}, T = {shape.T}, 16/32 heads, bf16 pool"
        if N == 1:
            cost = timing.host_microseconds(lambda bound=bound: bound.launch(0))  # type: ignore[misc]
            speed.note_start(implementation.name, "eager-call", cost, "us", where)
        else:
            speed.note_start(implementation.name, "peak-memory", extra, "MiB", where)


def test_new_process(speed: Session, tmp_path: Path) -> None:
    """The first call of a new process, with nothing compiled and with everything compiled."""
    where = "verify-snapshots, N = 1, T = 12, after `import torch`"
    for what in ("first-call", "cached-start"):
        speed.note_start("kernels/verify-chunk", what, first_call_in_new_process(tmp_path), "s", where)
