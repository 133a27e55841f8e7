"""What a call costs beside its device time: host time, memory, and the wait of a new process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import machine as machine_facts
from tests.bench import timing
from tests.bench.implementation import Bound, Implementation, Unsupported
from tests.bench.options import implementations
from tests.bench.problem import Problem, Shape
from tests.bench.session import Session
from tests.bench.start import first_call_in_new_process

if machine_facts.kind() != "sm90":
    pytest.skip("needs a Hopper GPU: no speed is measured here", allow_module_level=True)

#: op -> T and the dtype of the states
OPS = {"verify-snapshots": (12, "bf16"), "decode": (1, "bf16"), "decode-dense": (1, "fp32")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        # a peer in a process of its own is left out: there its wrapper finds kernels where it would compile them
        offered = [i for i in implementations(metafunc.config) if not hasattr(i, "remote")]
        cases = [(op, i) for op in OPS for i in offered if op in i.ops]
        metafunc.parametrize(("op", "implementation"), cases, ids=[f"{op} {i.name}" for op, i in cases])


@pytest.mark.parametrize(("what", "N"), (("eager-call", 1), ("peak-memory", 64)))
def test_one_call(what: str, N: int, op: str, implementation: Implementation, speed: Session) -> None:
    """Host time of one eager call, and the memory that it takes beyond what it was given."""
    if absent := implementation.absent():
        pytest.skip(absent)
    T, pool = OPS[op]
    shape = Shape(op, N, T, pool=pool, cold=False)
    problem = Problem(shape, speed.device, l2_bytes=1)
    try:
        bound = implementation.bind(problem)
    except Unsupported as reason:
        pytest.skip(str(reason))
    where = f"{op}, N = {N}, T = {T}, 16/32 heads, {pool} states"
    if what == "eager-call":
        call = bound.eager.call if bound.eager else lambda: bound.launch(0)
        cost, unit = timing.host_microseconds(call), "us"
        where += f"; {bound.eager.what}" if bound.eager else ""
    else:
        cost, unit = extra_memory(bound), "MiB"
    speed.note_start(implementation.name, what, cost, unit, where)


def extra_memory(bound: Bound) -> float:
    """MiB that a call allocates at its peak, once it has run before."""
    bound.launch(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bound.launch(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_new_process(speed: Session, tmp_path: Path) -> None:
    """The first call of a new process, with nothing compiled and with everything compiled."""
    where = "verify-snapshots, N = 1, T = 12, after `import torch`"
    for what in ("first-call", "cached-start"):
        speed.note_start("kernels/verify", what, first_call_in_new_process(tmp_path), "s", where)
