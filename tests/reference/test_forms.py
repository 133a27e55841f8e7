"""The recurrence against its chunk forms and against implementations by others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reference.chunk import chunked, outputs, segment_decay
from reference.recurrence import recurrent
from tests.gate_engine import Evidence
from tests.reference.cases import CASES, FP32_LIMIT, FP64_LIMIT, TOTAL, Case, rel_l2
from tests.reference.independent import FLA, TRANSFORMERS, NotInstalled

CHUNKS = (16, 32, 64)


@functools.cache
def truth(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The recurrence in fp64 on the inputs rounded to `dtype`."""
    return recurrent(**case.inputs(dtype, stored_in=torch.float64))


@pytest.mark.criterion("1.1")
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("case", CASES + TOTAL, ids=str)
def test_chunk_form_fp64(case: Case, chunk_size: int, evidence: Evidence) -> None:
    o, states = truth(case)
    o_chunk, states_chunk = chunked(**case.inputs(), chunk_size=chunk_size)
    evidence.at_most("chunk form: o rel L2", rel_l2(o_chunk, o), FP64_LIMIT)
    evidence.at_most("chunk form: states rel L2", rel_l2(states_chunk, states), FP64_LIMIT)


@pytest.mark.criterion("1.2")
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("case", CASES + TOTAL, ids=str)
def test_chunk_form_fp32(case: Case, chunk_size: int, evidence: Evidence) -> None:
    o, states = truth(case, torch.float32)
    o_chunk, states_chunk = chunked(**case.inputs(torch.float32), chunk_size=chunk_size)
    assert o_chunk.dtype == states_chunk.dtype == torch.float32
    evidence.at_most("chunk form: o rel L2", rel_l2(o_chunk, o), FP32_LIMIT)
    evidence.at_most("chunk form: states rel L2", rel_l2(states_chunk, states), FP32_LIMIT)


@pytest.mark.criterion("1.2")
@pytest.mark.parametrize("case", CASES + TOTAL, ids=str)
def test_recurrence_fp32(case: Case, evidence: Evidence) -> None:
    o, states = truth(case, torch.float32)
    o_32, states_32 = recurrent(**case.inputs(torch.float32))
    evidence.at_most("recurrence: o rel L2", rel_l2(o_32, o), FP32_LIMIT)
    evidence.at_most("recurrence: states rel L2", rel_l2(states_32, states), FP32_LIMIT)


@pytest.mark.criterion("1.3")
@pytest.mark.parametrize("case", CASES + TOTAL, ids=str)
def test_output_form(case: Case, evidence: Evidence) -> None:
    evidence.at_most("o rel L2", rel_l2(outputs(**case.inputs()), truth(case)[0]), FP64_LIMIT)


@pytest.mark.criterion("1.1")
def test_segment_decay_of_infinite_and_of_huge_decay() -> None:
    """What differences of running sums lose: -inf - (-inf) is NaN, and -1e20 + 1 - (-1e20) is not 1."""
    g = torch.tensor([[-1e20], [-1.0], [-torch.inf], [-2.0]], dtype=torch.float64)
    expected = torch.eye(4, dtype=torch.float64)
    expected[1, 0], expected[3, 2] = torch.exp(torch.tensor([-1.0, -2.0], dtype=torch.float64))
    assert torch.equal(segment_decay(g)[0], expected)


@pytest.mark.criterion("1.1")
def test_empty_sequence() -> None:
    inputs = Case(0, 2, 4, 24, 40).inputs()
    for form in (recurrent, chunked):
        o, states = form(**inputs)
        assert o.shape == (0, 4, 40) and states.shape == (0, 4, 40, 24)


def difference_limit(g: Tensor) -> float:
    """The fp32 limit of a chunk form that takes G_t - G_i: an fp32 |G| carries an error of |G| 2^-24 into exp."""
    running = max(float(part.sum(0).abs().max()) for part in g.split(64))
    return max(FP32_LIMIT, running * 2**-23)


def compare(other: Callable[..., tuple[Tensor, Tensor]], name: str, case: Case, evidence: Evidence) -> None:
    inputs = case.inputs(torch.float32)
    o_other, last = other(**inputs)
    o, states = truth(case, torch.float32)
    limit = FP32_LIMIT if name == "recurrent" else difference_limit(inputs["g"])
    kind = name if limit == FP32_LIMIT else f"{name}, strong decay"
    evidence.at_most(f"{kind}: o rel L2", rel_l2(o_other, o), limit)
    evidence.at_most(f"{kind}: last state rel L2", rel_l2(last, states[-1]), limit)


@pytest.mark.criterion("1.4")
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("case", [case for case in CASES if case.scale is None], ids=str)
def test_transformers(case: Case, name: str, evidence: Evidence) -> None:
    compare(TRANSFORMERS[name], name, case, evidence)


@pytest.mark.criterion("1.5")
@pytest.mark.parametrize("name", FLA)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fla(case: Case, name: str, evidence: Evidence) -> None:
    try:
        compare(FLA[name], name, case, evidence)
    except NotInstalled as error:
        pytest.skip(f"{error}: not run here")


@pytest.mark.criterion("1.4")
def test_head_groups_must_divide() -> None:
    with pytest.raises(ValueError, match="HV=5, H=2"):
        recurrent(**Case(3, 2, 5, 8, 8).inputs())
