"""Gate 2, paged decode: the same public call on CPU tensors computes the reference, at any K, V and float dtype."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kernels import decode
from tests.decode import test_errors
from tests.decode.cases import check, make, set_slots
from tests.gate_engine import Evidence
from tests.verify.cases import relative_l2


@pytest.mark.criterion("2.11")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24), (96, 32), (5, 3)))
@pytest.mark.parametrize("moves", (False, True), ids=("in place", "moves"))
@pytest.mark.parametrize("packed", (False, True), ids=("separate", "packed"))
def test_reference_path(K: int, V: int, moves: bool, packed: bool, evidence: Evidence) -> None:
    for pool in (torch.bfloat16, torch.float16, torch.float32):
        case = make(40, K=K, V=V, pool=pool, moves=moves)
        set_slots(case.read, -1, len(case.pool.view))
        if packed:
            case.run_packed()
        else:
            case.run()
        check(case, evidence)


@pytest.mark.criterion("2.11")
@pytest.mark.parametrize(
    "options",
    ({"scale": 0.0}, {"scale": -0.3}, {"allow_neg_eigval": True}, {"use_qk_l2norm_in_kernel": False}),
    ids=str,
)
def test_options(options: dict[str, Any], evidence: Evidence) -> None:
    case = make(6, K=32, V=48, pitched=True, **options)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("2.11")
@pytest.mark.parametrize("packed", (False, True), ids=("separate", "packed"))
def test_fp64_stays_fp64(packed: bool, evidence: Evidence) -> None:
    case = make(6, K=24, V=40, pool=torch.float32)
    want_o, want_pool = case.expected()
    mixed, a, b, A_log, dt_bias, pool = (x.double() for x in (case.mixed, *case.gates, case.pool.view))
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    if packed:
        o = decode.packed_recurrent_gated_delta_rule_decode(mixed, a, b, A_log, dt_bias, pool, case.read)[0]
    else:
        o = decode.recurrent_gated_delta_rule_decode(A_log, a, dt_bias, q, k, v, b, pool, case.read)
    assert o.dtype == torch.float64
    evidence.at_most("o of fp64 inputs, relative L2", relative_l2(o, want_o), 1e-14)
    evidence.at_most("fp64 states, relative L2", relative_l2(pool, want_pool), 1e-14)


@pytest.mark.criterion("2.10", "2.11")
@pytest.mark.parametrize(
    ("name", "edit", "error", "words"),
    [row for row in test_errors.BAD if row[2] is ValueError or "not a tensor" in row[0] or row[0].startswith("no ")],
    ids=lambda x: str(x)[:24],
)
def test_bad_input(name: str, edit: test_errors.Edit, error: type[Exception], words: tuple[str, ...]) -> None:
    """Shapes and types are checked as on a GPU."""
    case = make(3, slots=8, moves=True)
    guarded = dataclasses.replace(case)
    edit(case)
    test_errors.expect_error(test_errors.low_level(case), error, words, guarded)
