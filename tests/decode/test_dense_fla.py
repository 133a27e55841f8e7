"""Gate 2, dense recurrent decode: the reference path, and FLA's function of the same purpose."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.decode import dense
from tests.bench.peers import found
from tests.decode.dense_cases import check, check_values, make
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.reference.independent import FLA, NotInstalled
from tests.verify.cases import relative_l2

SOURCE = "fla/ops/gated_delta_rule/fused_recurrent.py"
FUNCTION = "fused_recurrent_gated_delta_rule"
#: what FLA's function takes and this one does not: gates of other shapes, activation inside, and its own catch-all
ONLY_FLA = {
    "gk", "gv", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
}  # fmt: skip
ONLY_HERE = {"seqlens", "head_first", "head_batch"}
#: FLA's default, ours: this one returns the state unless told otherwise, and has no gates of None
OTHER_DEFAULT = {
    "g": (None, inspect.Parameter.empty),
    "beta": (None, inspect.Parameter.empty),
    "output_final_state": (False, True),
}


@pytest.mark.criterion("2.28")
@pytest.mark.parametrize(("K", "V"), ((128, 128), (16, 24), (96, 40)))
@pytest.mark.parametrize(
    "options",
    (
        {"B": 2, "T": 5},
        {"B": 3, "T": 4, "seqlens": (9, 0, -2), "state_v_first": True, "scale": 0.0},
        {"packed": (3, 0, 70), "tail": 2, "index": torch.int64, "use_qk_l2norm_in_kernel": False},
        {"B": 1, "T": 130, "initial": False, "final": False, "head_batch": 2},
    ),
    ids=str,
)
def test_reference_path(K: int, V: int, options: dict[str, Any], evidence: Evidence) -> None:
    case = make(**options, K=K, V=V, pitched=True)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("2.28")
def test_fp64_stays_fp64(evidence: Evidence) -> None:
    case = make(2, 7, dtype=torch.float64)
    o, final = case.run_public()
    want_o, want_final = case.expected()
    assert o.dtype == torch.float64 and final is not None and final.dtype == torch.float64
    evidence.at_most("o of fp64 inputs, relative L2", relative_l2(o, want_o), 1e-14)
    evidence.at_most("states of fp64 inputs, relative L2", relative_l2(final, want_final), 1e-14)


@pytest.mark.criterion("2.28")
def test_any_strides_on_the_cpu(evidence: Evidence) -> None:
    case = make(2, 5)
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(case, name)
        setattr(case, name, x.mT.contiguous().mT)
    assert case.q.stride(-1) != 1
    check_values(case, *case.run_public(), evidence)


@pytest.mark.criterion("2.28")
@pytest.mark.parametrize("scale", (None, 0.3))
@pytest.mark.parametrize("norm", (True, False))
def test_equals_fla_naive(norm: bool, scale: float | None, evidence: Evidence) -> None:
    """FLA's naive function computes in fp32, one row at a time here; so do the inputs, so that nothing is rounded."""
    case = make(2, 9, V=64, dtype=torch.float32, use_qk_l2norm_in_kernel=norm, scale=scale)
    o, final = case.run_public()
    assert final is not None and case.initial is not None
    for row in range(2):
        inputs = (x[row] for x in (case.q, case.k, case.v, case.g, case.beta))
        try:
            want, S = FLA["recurrent"](*inputs, case.initial.view[row].mT, scale=scale, use_qk_l2norm=norm)
        except NotInstalled as error:
            pytest.skip(f"{error}: not run here")
        evidence.at_most("o against FLA's naive function, relative L2", relative_l2(o[row], want.double()), 2e-6)
        evidence.at_most("states against it, relative L2", relative_l2(final[row], S.mT.double()), 2e-6)


def fla_parameters() -> dict[str, Any]:
    """Parameter name -> default (Parameter.empty without one) of FLA's function, read from its source.

    Importing FLA needs Triton; parsing it does not.
    """
    try:
        path = Path(str(importlib.metadata.distribution("fla-core").locate_file(SOURCE)))
    except importlib.metadata.PackageNotFoundError:
        folder = found.unpacked_folder("fla")
        if folder is None:
            pytest.skip("fla-core is neither installed nor among the peers: not run here")
        path = folder / SOURCE
    functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
    arguments = next(node for node in functions if node.name == FUNCTION).args
    assert not arguments.posonlyargs and not arguments.kwonlyargs and arguments.vararg is None
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(node) for node in arguments.defaults]
    required = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return dict(zip(names, [*required, *defaults], strict=True))


@pytest.mark.criterion("2.29")
def test_signature_against_fla(evidence: Evidence) -> None:
    theirs = fla_parameters()
    ours = {name: p.default for name, p in inspect.signature(dense.recurrent_gated_delta_rule).parameters.items()}
    evidence.equal("parameters of FLA that are missing here", sorted(set(theirs) - set(ours)), sorted(ONLY_FLA))
    evidence.equal("parameters that FLA does not have", sorted(set(ours) - set(theirs)), sorted(ONLY_HERE))
    other = {name: (theirs[name], ours[name]) for name in theirs.keys() & ours if theirs[name] is not ours[name]}
    assert other == OTHER_DEFAULT


@pytest.mark.criterion("2.29")
@pytest.mark.parametrize("packed", (False, True))
def test_a_keyword_call_of_fla(packed: bool, device: torch.device, emulator: None, evidence: Evidence) -> None:
    """The arguments that a model passes, by FLA's names, and results of FLA's shapes."""
    shape: dict[str, Any] = {"packed": (4, 0, 7, 1), "index": torch.int64} if packed else {"B": 2, "T": 5}
    case = make(H=1, HV=2, V=256, state_v_first=True, **shape, device=device)
    assert case.initial is not None
    o, final = dense.recurrent_gated_delta_rule(
        case.q,
        case.k,
        case.v,
        g=case.g,
        beta=case.beta,
        scale=None,
        initial_state=case.initial.view,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=case.cu_seqlens,
        state_v_first=True,
    )
    want_o, want_final = case.expected()
    assert final is not None and o.shape == case.v.shape and final.shape == case.initial.view.shape
    evidence.at_most("o, relative L2 against fp64", relative_l2(o, want_o), ROUNDING[torch.bfloat16])
    evidence.at_most("states, relative L2 against fp64", relative_l2(final, want_final), ROUNDING[torch.float32])


@pytest.mark.criterion("2.32")
@pytest.mark.sm90
@pytest.mark.parametrize("state_v_first", (False, True))
@pytest.mark.parametrize("shape", ({"B": 4, "T": 1}, {"B": 2, "T": 17}, {"packed": (4, 0, 7), "index": torch.int64}))
def test_numbers_of_fla(shape: dict[str, Any], state_v_first: bool, evidence: Evidence) -> None:
    if reason := found.absence("fla"):
        pytest.skip(f"{reason}: not run here")
    fused_recurrent_gated_delta_rule = found.modules("fla")[0].fused_recurrent_gated_delta_rule
    case = make(H=16, HV=32, **shape, state_v_first=state_v_first, device="cuda")
    assert case.initial is not None
    arguments: dict[str, Any] = {
        "q": case.q.contiguous(), "k": case.k.contiguous(), "v": case.v.contiguous(), "g": case.g, "beta": case.beta,
        "scale": None, "initial_state": case.initial.view, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": case.cu_seqlens, "state_v_first": state_v_first,
    }  # fmt: skip
    theirs, their_state = fused_recurrent_gated_delta_rule(**arguments)
    ours, our_state = dense.recurrent_gated_delta_rule(**arguments)
    assert our_state is not None
    # both are rounded to bf16, mostly to the same values; the states differ by fp32 products and sums
    evidence.at_most("o against FLA's kernel, relative L2", relative_l2(ours, theirs.double()), 2.5e-3)
    evidence.at_most("states against it, relative L2", relative_l2(our_state, their_state.double()), 2e-6)
