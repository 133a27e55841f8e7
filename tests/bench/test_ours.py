"""Our implementations as the benchmark binds them: right, on every way, and refused where they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench import check
from tests.bench.implementation import Unsupported
from tests.bench.ours import is_for, ours
from tests.bench.problem import Problem, Shape
from tests.gate_engine import Evidence

CPU = torch.device("cpu")
DECODES = [implementation for implementation in ours() if "decode" in implementation.name]


def pool_of(op: str) -> str:
    """A dtype of the states that every implementation of ours takes."""
    return "fp32" if op == "decode-dense" else "bf16"


@pytest.mark.criterion("7.6")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("implementation", ours(), ids=lambda implementation: str(implementation.name))
def test_our_implementations_are_bound_right(implementation: Any, device: torch.device, evidence: Evidence) -> None:
    for op in implementation.ops:
        shape = Shape(op, N=2, T=1 if op in ("decode", "decode-ring") else 3, H=1, HV=2, pool=pool_of(op))
        problem = Problem(shape, device, l2_bytes=1)
        bound = implementation.bind(problem)
        errors = check.run_and_compare(problem, bound)
        dtypes = {name: tensor.dtype for name, tensor in bound.outputs().items()}
        assert check.verdict(errors, dtypes, implementation.name, shape.T) == ""
        for name, error in errors.items():
            limit = check.allowed(implementation.name, dtypes[name], shape.T)
            evidence.at_most(f"{op}: {name}, relative L2 against fp64, over its limit", error / limit, 1.0)


@pytest.mark.criterion("7.6")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("implementation", DECODES, ids=lambda i: str(i.name))
def test_the_call_of_the_host_cost_is_the_one_that_is_timed(implementation: Any, device: torch.device) -> None:
    """The public function, from the same states, gives the bits of the launch."""
    (op,) = implementation.ops
    problem = Problem(Shape(op, N=2, T=1, H=1, HV=2, pool=pool_of(op)), device, l2_bytes=1)
    bound = implementation.bind(problem)
    bound.reset()
    bound.launch(0)
    launched = {name: tensor.clone() for name, tensor in bound.outputs().items()}
    bound.reset()
    returned = bound.eager.call()
    found = bound.outputs()
    if op == "decode-dense":
        found = {"o": returned[0], "final": returned[1].mT}
    assert launched.keys() == found.keys() == {"o", "final"}
    assert all(torch.equal(launched[name], found[name]) for name in found)


@pytest.mark.criterion("7.6")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("implementation", DECODES, ids=lambda i: str(i.name))
def test_decode_visits_every_way(implementation: Any, device: torch.device) -> None:
    """A launch of way w moves the states of way w and no other's: dense states from one buffer to the other."""
    (op,) = implementation.ops
    shape = Shape(op, N=1, T=1, H=1, HV=2, pool=pool_of(op))
    problem = Problem(shape, device, l2_bytes=shape.state_bytes)
    assert problem.ways == 2
    bound = implementation.bind(problem)

    def states() -> list[Tensor]:
        if op == "decode-dense":
            return list(problem.final_k_major.clone())
        return [problem.pool[indices.long()] for indices in problem.indices]

    before, initial = states(), problem.initial_k_major.clone()
    bound.launch(1)
    after = states()
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    assert torch.equal(initial, problem.initial_k_major)


@pytest.mark.criterion("7.2")
@pytest.mark.parametrize(
    ("shape", "reason"),
    ((Shape("decode", 1, 2, 1, 2), "T is 2, supported: 1"), (Shape("decode-dense", 1, 2, 1, 2), "pool is bf16")),
    ids=str,
)
def test_shapes_outside_our_decode_are_refused(shape: Shape, reason: str) -> None:
    problem = Problem(shape, CPU, l2_bytes=1)
    for implementation in (i for i in ours() if shape.op in i.ops):
        with pytest.raises(Unsupported, match=reason):
            implementation.bind(problem)


def test_only_an_option_may_not_be_for_a_shape() -> None:
    """Three value heads a key head cannot be paired. What else is ours has to take every shape of its ops."""
    shape = Shape("verify-snapshots", N=1, T=2, H=1, HV=3)
    (pairs,) = (implementation for implementation in ours() if not is_for(implementation, shape))
    assert pairs.name == "kernels/verify-chunk-two-heads"
    with pytest.raises(Unsupported, match="multiples of 2"):
        pairs.bind(Problem(shape, CPU, l2_bytes=1))
    assert all(is_for(implementation, Shape("decode", N=1, T=1, H=2, HV=4)) for implementation in ours())
