"""The reference on what real layers handed to their recurrence, against what they returned."""

from __future__ import annotations

import hashlib

import pytest
import torch

from reference import gating
from reference.pool import verify_gated_fwd
from reference.recurrence import recurrent
from tests.data import RealInput, load_real_inputs
from tests.data.capture_real_inputs import CASES, LICENSE, capture
from tests.gate_engine import Evidence
from tests.reference.cases import FP32_LIMIT, rel_l2

real = pytest.mark.parametrize("x", load_real_inputs(), ids=lambda x: x.name)
BF16 = 2.0**-8  # the largest rounding of one value
BF16_L2 = 2e-3  # of many: errors spread evenly over +-BF16 of a power of two below the value, about 1.7e-3


@pytest.mark.criterion("1.12")
@real
def test_recurrence_on_the_layers_own_gates(x: RealInput, evidence: Evidence) -> None:
    """The layer computed in fp32 and returned o in bf16, the state in fp32."""
    tensors = (tensor.double() for tensor in (x.q, x.k, x.v, x.g, x.beta, x.state))
    o, states = recurrent(*tensors, use_qk_l2norm=True)
    evidence.at_most("last state rel L2", rel_l2(x.state_after, states[-1]), FP32_LIMIT)
    evidence.at_most("o rel L2", rel_l2(x.o, o), BF16_L2)
    wrong = (x.o != o.bfloat16()).sum().item()
    evidence.at_most("o: share not equal to the rounded reference", wrong / o.numel(), 0.01)


@pytest.mark.criterion("1.12")
@real
def test_raw_gates(x: RealInput, evidence: Evidence) -> None:
    """The layer's g is fp32; its beta is a bf16 sigmoid of a bf16 b, which is the layer's rounding and not ours."""
    g, beta = gating.gates(x.A_log.double(), x.a, x.dt_bias, x.b)
    evidence.at_most("g rel L2", rel_l2(x.g, g), 1e-6)
    evidence.at_most("beta, largest rel difference", ((x.beta - beta) / beta).abs().max().item(), BF16)


@pytest.mark.criterion("1.12")
@real
def test_pool_from_raw_gates(x: RealInput, evidence: Evidence) -> None:
    """End to end from the raw gates, as a kernel is called: the difference is the layer's rounding of beta."""
    T, HV, V = x.v.shape
    o = torch.empty(T, HV, V, dtype=torch.float64)
    states = torch.empty(1, T, HV, V, x.q.shape[-1], dtype=torch.float64)
    slot, ends = torch.tensor([0], dtype=torch.int32), torch.tensor([0, T], dtype=torch.int32)
    gates = (x.a, x.b, x.A_log, x.dt_bias)
    verify_gated_fwd(x.q, x.k, x.v, *gates, x.state[None], slot, ends, o, states, dtype=torch.float64)
    evidence.at_most("from raw gates: last state rel L2", rel_l2(x.state_after, states[0, -1]), BF16)
    evidence.at_most("from raw gates: o rel L2", rel_l2(x.o, o), BF16_L2 + BF16)


@pytest.mark.criterion("1.12")
def test_files_are_those_of_the_script() -> None:
    recorded = {x.name: x.facts for x in load_real_inputs()}
    assert set(recorded) == {case.name for case in CASES}
    text = hashlib.sha256(LICENSE.read_bytes()).hexdigest()
    assert all(facts["text_sha256"] == text for facts in recorded.values())


@pytest.mark.criterion("1.12")
def test_a_layer_run_here(evidence: Evidence) -> None:
    """The capture itself, with the transformers installed here."""
    x = capture(CASES[-1])
    tensors = (x[name].double() for name in ("q", "k", "v", "g", "beta", "state"))
    o, states = recurrent(*tensors, use_qk_l2norm=True)
    evidence.at_most("layer run here: last state rel L2", rel_l2(x["state_after"], states[-1]), FP32_LIMIT)
    evidence.at_most("layer run here: o rel L2", rel_l2(x["o"], o), BF16_L2)
