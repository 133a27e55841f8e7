"""Gate 2, dense recurrent decode: bad input raises before any launch, names value, limit and remedy, writes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import runtime
from kernels.decode import dense
from tests.decode.dense_cases import DenseCase, make

Edit = Callable[[DenseCase], None]
Row = tuple[str, Edit, type[Exception], tuple[str, ...]]


def put(name: str, change: Callable[[Tensor], Any]) -> Edit:
    """Replace an input of the case; for a guarded buffer, its view."""

    def edit(case: DenseCase) -> None:
        old = getattr(case, name)
        if name in ("o", "initial", "final"):
            setattr(case, name, dataclasses.replace(old, view=change(old.view)))
        else:
            setattr(case, name, change(old))

    return edit


def option(**options: Any) -> Edit:
    return lambda case: case.options.update(options)


def index(name: str, *values: int, dtype: torch.dtype = torch.int32) -> Edit:
    return lambda case: setattr(case, name, torch.tensor(values, dtype=dtype, device=case.q.device))


def both(case: DenseCase) -> None:
    index("seqlens", 6, 6)(case)
    index("cu_seqlens", 0, 6, 12)(case)


def half_the_heads(case: DenseCase) -> None:
    for name in ("v", "g", "beta"):
        setattr(case, name, getattr(case, name)[:, :, :3])


def misaligned(x: Tensor) -> Tensor:
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


def odd_pitch(x: Tensor) -> Tensor:
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 2, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def row_pitch(x: Tensor) -> Tensor:
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 4, dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


#: (what is wrong, how, the error, what its text must hold)
BAD: tuple[Row, ...] = (
    ("q dtype", put("q", lambda x: x.float()), TypeError, ("q", "float32", "bfloat16 or torch.float16", ".to(")),
    ("k of another dtype", put("k", lambda x: x.half()), TypeError, ("k", "float16", "bfloat16")),
    ("v dtype", put("v", lambda x: x.float()), TypeError, ("v", "float32", "bfloat16")),
    ("g dtype", put("g", lambda x: x.bfloat16()), TypeError, ("g", "bfloat16", "float32")),
    ("no g", put("g", lambda x: None), TypeError, ("g", "NoneType", "torch.Tensor")),
    ("no beta", put("beta", lambda x: None), TypeError, ("beta", "NoneType", "torch.Tensor")),
    ("q not a tensor", put("q", lambda x: x.tolist()), TypeError, ("q", "list", "torch.Tensor")),
    ("initial dtype", put("initial", lambda x: x.bfloat16()), TypeError, ("initial_state", "bfloat16", "float32")),
    ("q rank", put("q", lambda x: x[0]), ValueError, ("q", "(6, 2, 128)", "(B, T, H, K)")),
    ("k heads", put("k", lambda x: x[:, :, :1]), ValueError, ("k", "(2, 6, 1, 128)", "2, 6, 2, 128")),
    ("v tokens", put("v", lambda x: x[:, 1:]), ValueError, ("v", "(2, 5, 4, 64)", "2, 6, any, any")),
    ("HV not a multiple", half_the_heads, ValueError, ("3 heads", "2", "multiple")),
    ("g shape", put("g", lambda x: x.mT), ValueError, ("g", "(2, 4, 6)", "2, 6, 4")),
    ("beta shape", put("beta", lambda x: x[..., :3]), ValueError, ("beta", "(2, 6, 3)", "2, 6, 4")),
    ("states", put("initial", lambda x: x[:1]), ValueError, ("initial_state", "(1, 4, 128, 64)", "2, 4, 128, 64")),
    ("state layout", put("initial", lambda x: x.mT), ValueError, ("initial_state", "(2, 4, 64, 128)", "2, 4, 128, 64")),
    ("both lengths", both, ValueError, ("seqlens", "cu_seqlens", "one of them")),
    ("seqlens dtype", index("seqlens", 6, 6, dtype=torch.int64), TypeError, ("seqlens", "int64", "int32")),
    ("seqlens shape", index("seqlens", 6), ValueError, ("seqlens", "(1,)", "2")),
    ("cu_seqlens of rows", index("cu_seqlens", 0, 6, 12), ValueError, ("2 batch rows", "1 with cu_seqlens", "pack")),
    ("cu_seqlens empty", index("cu_seqlens"), ValueError, ("cu_seqlens", "(0,)", "at least")),
    ("head_batch beyond the group", option(head_batch=4), ValueError, ("4", "2 value heads", "pass None")),
    ("head_batch of 3", option(head_batch=3), ValueError, ("head_batch", "3", "1, 2 or 4")),
)  # fmt: skip

#: limits of the SM90 program; the reference on CPU tensors has none of them
BAD_LAUNCH: tuple[Row, ...] = (
    ("q address", put("q", misaligned), ValueError, ("q", "mod 16", "clone()")),
    ("k pitch", put("k", odd_pitch), ValueError, ("k", "multiples of 8", "contiguous()")),
    ("v not contiguous inside", put("v", transposed), ValueError, ("v", "contiguous")),
    ("initial address", put("initial", misaligned), ValueError, ("initial_state", "mod 16", "clone()")),
    ("initial row pitch", put("initial", row_pitch), ValueError, ("initial_state", "last 2", "contiguous()")),
)  # fmt: skip

#: the buffers that only the low-level function takes
BAD_BUFFERS: tuple[Row, ...] = (
    ("o dtype", put("o", lambda x: x.float()), TypeError, ("o", "float32", "bfloat16")),
    ("o shape", put("o", lambda x: x[:, 1:]), ValueError, ("o", "(2, 5, 4, 64)", "2, 6, 4, 64")),
    ("o not contiguous inside", put("o", transposed), ValueError, ("o", "contiguous")),
    ("final dtype", put("final", lambda x: x.half()), TypeError, ("final_state", "float16", "float32")),
    ("final shape", put("final", lambda x: x[..., 1:]), ValueError, ("final_state", "(2, 4, 128, 63)", "128, 64")),
    ("final row pitch", put("final", row_pitch), ValueError, ("final_state", "last 2", "contiguous()")),
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(runtime, "cpu_launcher", refuse)
    monkeypatch.setattr(runtime, "executable", lambda program: refuse)


def small(device: torch.device, **options: Any) -> DenseCase:
    return make(**{"V": 64, **options}, device=device)


def expect_error(case: DenseCase, error: type[Exception], words: tuple[str, ...], call: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    for buffer in (case.o, case.initial, case.final):
        assert buffer is not None and not buffer.differs().any(), "a buffer changed"


@pytest.mark.criterion("2.27")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD + BAD_LAUNCH, ids=[row[0] for row in BAD + BAD_LAUNCH])
def test_bad_input(name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device) -> None:
    """Both functions refuse it."""
    case = small(device)
    edit(case)
    expect_error(case, error, words, case.run)
    expect_error(case, error, words, case.run_public)


@pytest.mark.criterion("2.27")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD_BUFFERS, ids=[row[0] for row in BAD_BUFFERS])
def test_bad_buffers(
    name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device
) -> None:
    case = small(device)
    edit(case)
    expect_error(case, error, words, case.run)


@pytest.mark.criterion("2.27")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("K", 256, 128), ("V", 128, 96)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device) -> None:
    case = small(device, K=K, V=V)
    expect_error(case, ValueError, (f"{name} is {({'K': K, 'V': V})[name]}", "CPU tensors"), case.run)


@pytest.mark.criterion("2.27")
@pytest.mark.parametrize(
    ("starts", "words"),
    (((0, 5, 4), ("never decrease",)), ((1, 4, 6), ("start at 0",)), ((0, 4, 7), ("at most at 6",))),
)
def test_bad_cu_seqlens_on_the_host(starts: tuple[int, ...], words: tuple[str, ...]) -> None:
    """On a device these values cannot be read without a synchronisation; there they are memory-safe instead."""
    case = make(V=64, packed=(4, 2))
    index("cu_seqlens", *starts)(case)
    expect_error(case, ValueError, (str(list(starts)), *words), case.run)


@pytest.mark.criterion("2.27")
def test_mixed_devices(device: torch.device) -> None:
    other = "meta" if device.type == "cpu" else "cpu"
    case = small(device)
    put("beta", lambda x: x.to(other))(case)
    expect_error(case, ValueError, ("beta is on", other, "move it"), case.run)


@pytest.mark.criterion("2.27")
def test_head_first_shapes(device: torch.device) -> None:
    case = small(device)
    call = dense.recurrent_gated_delta_rule
    with pytest.raises(ValueError, match=r"g has shape \(2, 6\), must have 3 dimensions, the heads second"):
        call(case.q, case.k, case.v, case.g[..., 0], case.beta, head_first=True)
    with pytest.raises(TypeError, match=r"q is NoneType, must be a torch\.Tensor"):
        call(None, case.k, case.v, case.g, case.beta, head_first=True)  # type: ignore[arg-type]
    q, k, v, g, beta = (x.transpose(1, 2) for x in (case.q, case.k, case.v[:, 1:], case.g, case.beta))
    with pytest.raises(ValueError, match=r"v has shape \(2, 5, 4, 64\), .* tokens before the heads"):
        call(q, k, v, g, beta, head_first=True)
