"""Gate 3: bad input raises before any launch, names value, limit and remedy, and leaves every buffer untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime, verify
from tests.verify.cases import Case, make

Edit = Callable[[Case], None]


def put(name: str, change: Callable[[torch.Tensor], Any]) -> Edit:
    """Replace an input of the case; for a guarded buffer, its view."""

    def edit(case: Case) -> None:
        old = getattr(case, name)
        if name in ("pool", "o", "states"):
            setattr(case, name, dataclasses.replace(old, view=change(old.view)))
        else:
            setattr(case, name, change(old))

    return edit


def option(**options: Any) -> Edit:
    return lambda case: case.options.update(options)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


def odd_pitch(x: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(x.shape[0], x[0].numel() + 3, dtype=x.dtype, device=x.device)
    return wide[:, : x[0].numel()].view(x.shape).copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


#: (what is wrong, how, the error, what its text must hold)
BAD: tuple[tuple[str, Edit, type[Exception], tuple[str, ...]], ...] = (
    ("q dtype", put("q", lambda x: x.half()), TypeError, ("q", "float16", "bfloat16", ".to(")),
    ("v dtype", put("v", lambda x: x.float()), TypeError, ("v", "float32", "bfloat16")),
    ("o dtype", put("o", lambda x: x.float()), TypeError, ("o", "float32", "bfloat16")),
    ("pool dtype", put("pool", lambda x: x.double()), TypeError, ("ssm_states", "float64", "bfloat16")),
    ("states dtype", put("states", lambda x: x.float()), TypeError, ("intermediate_states", "float32", "bfloat16")),
    ("A_log dtype", put("A_log", lambda x: x.bfloat16()), TypeError, ("A_log", "bfloat16", "float32")),
    ("mixed gate dtypes", put("b", lambda x: x.float()), TypeError, ("b", "float32", "bfloat16")),
    ("slot index dtype", put("state_indices", lambda x: x.long()), TypeError, ("state_indices", "int64", "int32")),
    ("cu_seqlens dtype", put("cu_seqlens", lambda x: x.long()), TypeError, ("cu_seqlens", "int64", "int32")),
    ("row index dtype", put("rows", lambda x: x.float()), TypeError, ("intermediate_indices", "float32", "int32")),
    ("q not a tensor", put("q", lambda x: x.tolist()), TypeError, ("q", "list", "torch.Tensor")),
    ("k heads", put("k", lambda x: x[:, :1]), ValueError, ("k", "(24, 1, 128)", "24, 2, 128")),
    ("k tokens", put("k", lambda x: x[:-1]), ValueError, ("k", "(23, 2, 128)", "24, 2, 128")),
    ("HV not a multiple", put("v", lambda x: x[:, :3]), ValueError, ("3 heads", "2", "multiple")),
    ("two batch rows", put("q", lambda x: x.view(2, -1, 2, 128)), ValueError, ("q", "leading 1", "pack")),
    ("a shape", put("a", lambda x: x[:, :2]), ValueError, ("a", "(24, 2)", "24, 4")),
    ("dt_bias shape", put("dt_bias", lambda x: x[:3]), ValueError, ("dt_bias", "(3,)", "4")),
    ("pool heads", put("pool", lambda x: x[:, :2]), ValueError, ("ssm_states", "(4, 2, 128, 128)", "4, 128, 128")),
    ("states rank", put("states", lambda x: x[0]), ValueError, ("intermediate_states", "(12, 4, 128, 128)")),
    ("o shape", put("o", lambda x: x[:-1]), ValueError, ("o", "(23, 4, 128)", "24, 4, 128")),
    ("cu_seqlens length", put("cu_seqlens", lambda x: x[:-1]), ValueError, ("cu_seqlens", "(2,)", "3")),
    ("too few rows", put("rows", lambda x: x[:1]), ValueError, ("intermediate_indices", "(1,)", "at least")),
    ("steps < T", put("states", lambda x: x[:, :8]), ValueError, ("24 tokens", "2 requests", "8 steps", "12")),
    ("cache_steps > D", option(cache_steps=13), ValueError, ("cache_steps", "13", "12", "larger buffer")),
    ("head_batch beyond the group", option(head_batch=4), ValueError, ("head_batch", "4", "2 value heads", "pass 1")),
    ("head_batch of 3", option(head_batch=3), ValueError, ("head_batch", "3", "1, 2 or 4")),
    ("heads, lossless", option(head_batch=2, lossless=True), ValueError, ("head_batch", "2", "lossless", "pass 1")),
    ("cache_steps < 0", option(cache_steps=-1), ValueError, ("cache_steps", "-1", "between 0 and")),
    ("strided index", put("state_indices", lambda x: x.repeat(2)[::2]), ValueError, ("state_indices", "contiguous")),
    ("token tree", option(retrieve_parent_token=torch.zeros(2, 12)), NotImplementedError, ("None", "linear chain")),
)  # fmt: skip

#: limits of the SM90 programs; the reference on CPU tensors has none of them
BAD_LAUNCH: tuple[tuple[str, Edit, type[Exception], tuple[str, ...]], ...] = (
    ("q address", put("q", misaligned), ValueError, ("q", "mod 16", "clone()")),
    ("k token pitch", put("k", odd_pitch), ValueError, ("k", "multiples of 8", "contiguous()")),
    ("v not contiguous inside", put("v", transposed), ValueError, ("v", "contiguous")),
    ("pool not contiguous inside", put("pool", transposed), ValueError, ("ssm_states", "contiguous()")),
    ("states not contiguous inside", put("states", transposed), ValueError, ("intermediate_states", "contiguous()")),
)  # fmt: skip


def untouched(case: Case) -> bool:
    return not any((b.differs()).any() for b in (case.pool, case.o, case.states))


def expect_error(case: Case, edit: Edit, error: type[Exception], words: tuple[str, ...]) -> None:
    guarded = dataclasses.replace(case)
    edit(case)
    with pytest.raises(error) as caught:
        case.run()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert untouched(guarded), "a buffer changed"


@pytest.fixture(autouse=True)
def nothing_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(runtime, "cpu_launcher", refuse)
    monkeypatch.setattr(runtime, "executable", lambda program: refuse)


@pytest.mark.criterion("3.14")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD + BAD_LAUNCH, ids=[row[0] for row in BAD + BAD_LAUNCH])
def test_bad_input(name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device) -> None:
    expect_error(make(N=2, T=12, device=device), edit, error, words)


@pytest.mark.criterion("3.14")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("K", 256, 128), ("V", 128, 96)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device) -> None:
    value = {"K": K, "V": V}[name]
    expect_error(make(K=K, V=V, device=device), lambda case: None, ValueError, (f"{name} is {value}", "CPU tensors"))


@pytest.mark.criterion("3.14")
@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    (
        ((0, 13, 12), ("never decrease",)),
        ((0, -2, 24), ("never decrease",)),
        ((1, 12, 24), ("start at 0",)),
        ((0, 12, 25), ("at most at 24",)),
        ((0, 4, 24), ("20 tokens", "12 steps")),
    ),
)
def test_bad_cu_seqlens_on_the_host(cu_seqlens: tuple[int, ...], words: tuple[str, ...]) -> None:
    """On a device these values cannot be read without a synchronisation; there they are memory-safe instead."""
    case = make(N=2, T=12)
    expect_error(case, put("cu_seqlens", lambda x: torch.tensor(cu_seqlens, dtype=x.dtype)), ValueError, words)


@pytest.mark.criterion("3.14")
def test_mixed_devices(device: torch.device) -> None:
    other = "meta" if device.type == "cpu" else "cpu"
    edit = put("k", lambda x: x.to(other))
    expect_error(make(device=device), edit, ValueError, ("k is on", other, "move it"))


@pytest.mark.criterion("3.14")
def test_low_level_entries_check_too(device: torch.device) -> None:
    case = make(device=device)
    g, beta = verify.gdn_sigmoid_gate(case.A_log, case.a, case.dt_bias, case.b)
    rest = (case.pool.view, case.state_indices, case.cu_seqlens, case.o.view, case.states.view, case.rows)
    with pytest.raises(TypeError, match=r"g has dtype torch\.bfloat16, must be torch\.float32"):
        verify.fused_recurrent_gdr_verify_fwd(case.q, case.k, case.v, g.bfloat16(), beta, *rest)
    with pytest.raises(ValueError, match=r"beta has shape \(23, 4\)"):
        verify.fused_recurrent_gdr_verify_fwd(case.q, case.k, case.v, g, beta[:-1], *rest)
    with pytest.raises(ValueError, match=r"q has shape \(1, 24, 2, 128\), must be \(NT, H, K\)"):
        verify.fused_recurrent_gdr_verify_gated_fwd(
            case.q[None], case.k, case.v, case.a, case.b, case.A_log, case.dt_bias, *rest
        )
    assert untouched(case)
