"""Gate 4: bad input raises before any launch, names value, limit and remedy, and leaves every buffer untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime, verify
from tests.prepass.cases import OUTPUTS, Case, make
from tests.verify import cases
from tests.verify.test_errors import expect_error, misaligned, odd_pitch, option, transposed, untouched

Edit = Callable[[Case], None]


def put(name: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Replace an input of the case; for an output, its view."""

    def edit(case: Case) -> None:
        old = getattr(case, name)
        if name in OUTPUTS:
            setattr(case, name, dataclasses.replace(old, view=change(old.view)))
        else:
            setattr(case, name, change(old))

    return edit


#: (what is wrong, how, the error, what its text must hold)
BAD: tuple[tuple[str, Edit, type[Exception], tuple[str, ...]], ...] = (
    ("q rank", put("q", lambda x: x[None]), ValueError, ("q", "(1, 12, 2, 128)", "(NT, H, K)")),
    ("q not a tensor", put("q", lambda x: x.tolist()), ValueError, ("q", "(NT, H, K)")),
    ("q dtype", put("q", lambda x: x.half()), TypeError, ("q", "float16", "bfloat16", ".to(")),
    ("k tokens", put("k", lambda x: x[:-1]), ValueError, ("k", "(11, 2, 128)", "12, 2, 128")),
    ("a rank", put("a", lambda x: x[None]), ValueError, ("a", "(1, 12, 4)", "(NT, HV)")),
    ("a tokens", put("a", lambda x: x[:-1]), ValueError, ("a", "(11, 4)", "12, 4")),
    ("HV not a multiple", put("a", lambda x: x[:, :3]), ValueError, ("3 heads", "2", "multiple")),
    ("b shape", put("b", lambda x: x[:, :2]), ValueError, ("b", "(12, 2)", "12, 4")),
    ("mixed gate dtypes", put("b", lambda x: x.float()), TypeError, ("b", "float32", "bfloat16")),
    ("A_log dtype", put("A_log", lambda x: x.bfloat16()), TypeError, ("A_log", "bfloat16", "float32")),
    ("dt_bias shape", put("dt_bias", lambda x: x[:3]), ValueError, ("dt_bias", "(3,)", "4")),
    ("g dtype", put("g", lambda x: x.bfloat16()), TypeError, ("g", "bfloat16", "float32", ".to(")),
    ("beta shape", put("beta", lambda x: x[:, :2]), ValueError, ("beta", "(12, 2)", "12, 4")),
    ("q norm heads", put("q_inv_norm", lambda x: x[:, :1]), ValueError, ("q_inv_norm", "(12, 1)", "12, 2")),
    ("k norm missing", put("k_inv_norm", lambda x: None), TypeError, ("k_inv_norm", "NoneType", "torch.Tensor")),
    ("g strides", put("g", lambda x: x.T.contiguous().T), ValueError, ("g", "contiguous()")),
    ("q address", put("q", misaligned), ValueError, ("q", "mod 16", "clone()")),
    ("k token pitch", put("k", odd_pitch), ValueError, ("k", "multiples of 8", "contiguous()")),
    ("q not contiguous inside", put("q", transposed), ValueError, ("q", "contiguous()")),
)


@pytest.fixture(autouse=True)
def nothing_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(runtime, "cpu_launcher", refuse)
    monkeypatch.setattr(runtime, "executable", lambda program: refuse)


@pytest.mark.criterion("4.6")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad_input(name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device) -> None:
    case = make(device=device)
    guarded = case.outputs
    edit(case)
    with pytest.raises(error) as caught:
        case.run()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert not any(buffer.differs().any() for buffer in guarded), "a buffer changed"


@pytest.mark.criterion("4.6")
@pytest.mark.parametrize("K", (64, 256))
def test_unsupported_key_dim(K: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match=rf"K is {K}, must be one of \(128,\) on a GPU; CPU tensors take any K"):
        make(K=K, device=device).run()


@pytest.mark.criterion("4.6")
def test_mixed_devices(device: torch.device) -> None:
    case = make(device=device)
    put("k", lambda x: x.to("meta" if device.type == "cpu" else "cpu"))(case)
    with pytest.raises(ValueError, match=r"k is on .* move it"):
        case.run()


#: what a verify refuses when asked for a prepass
EXCLUDED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("lossless", {"prepass": True, "lossless": True}, ("prepass=True", "lossless=True", "prepass=None")),
    ("host gates", {"prepass": True, "fuse_gating": False}, ("prepass=True", "fuse_gating=False", "fuse_gating=True")),
)


@pytest.mark.criterion("4.6")
@pytest.mark.parametrize(("name", "options", "words"), EXCLUDED, ids=[row[0] for row in EXCLUDED])
def test_verify_without_a_place_for_a_prepass(
    name: str, options: dict[str, Any], words: tuple[str, ...], device: torch.device
) -> None:
    expect_error(cases.make(device=device), option(**options), ValueError, words)


@pytest.mark.criterion("4.6")
@pytest.mark.parametrize("name", ("q", "pool", "o", "states"))
def test_verify_checks_all_before_the_first_launch(name: str, device: torch.device) -> None:
    """Also what only the second launch reads or writes."""

    def edit(case: cases.Case) -> None:
        old = getattr(case, name)
        buffer = isinstance(old, cases.Buffer)
        odd = misaligned(old.view if buffer else old)
        setattr(case, name, dataclasses.replace(old, view=odd) if buffer else odd)

    expect_error(cases.make(prepass=True, device=device), edit, ValueError, ("mod 16", "clone()"))


#: (options, q_inv_norm, k_inv_norm of 12 + 12 tokens and 2 heads; None: not given), the error, its words
GIVEN: tuple[tuple[dict[str, Any], Any, Any, type[Exception], tuple[str, ...]], ...] = (
    ({}, (24, 2), None, ValueError, ("k_inv_norm is None", "both or neither")),
    ({}, None, (24, 2), ValueError, ("q_inv_norm is None", "both or neither")),
    ({}, (24, 4), (24, 2), ValueError, ("q_inv_norm", "(24, 4)", "24, 2")),
    ({}, (24, 2), (23, 2), ValueError, ("k_inv_norm", "(23, 2)", "24, 2")),
    ({"use_qk_l2norm_in_kernel": False}, (24, 2), (24, 2), ValueError, ("use_qk_l2norm_in_kernel is False", "leave")),
    ({"lossless": True}, (24, 2), (24, 2), ValueError, ("lossless is True", "leave them out")),
)


@pytest.mark.criterion("4.6")
@pytest.mark.parametrize(("options", "q_shape", "k_shape", "error", "words"), GIVEN, ids=str)
def test_given_norms(
    options: dict[str, Any], q_shape: Any, k_shape: Any, error: type[Exception], words: tuple[str, ...],
    device: torch.device,
) -> None:  # fmt: skip
    norms = [shape and torch.ones(shape, device=device) for shape in (q_shape, k_shape)]
    call_with_norms(cases.make(device=device), options, norms, error, words)


@pytest.mark.criterion("4.6")
def test_given_norms_dtype_and_strides(device: torch.device) -> None:
    ones = torch.ones(24, 2, device=device)
    case = cases.make(device=device)
    call_with_norms(case, {}, [ones.bfloat16(), ones], TypeError, ("q_inv_norm", "bfloat16", "float32"))
    call_with_norms(case, {}, [ones, ones.T.contiguous().T], ValueError, ("k_inv_norm", "contiguous()"))


def call_with_norms(
    case: cases.Case, options: dict[str, Any], norms: list[Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    g, beta = verify.gdn_sigmoid_gate(case.A_log, case.a, case.dt_bias, case.b)
    with pytest.raises(error) as caught:
        verify.fused_recurrent_gdr_verify_fwd(
            case.q, case.k, case.v, g, beta, case.pool.view, case.state_indices, case.cu_seqlens, case.o.view,
            case.states.view, case.rows, q_inv_norm=norms[0], k_inv_norm=norms[1], **options,
        )  # fmt: skip
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert untouched(case)
