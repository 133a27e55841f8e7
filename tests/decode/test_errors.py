"""Gate 2, paged decode: bad input raises before any launch, names value, limit and remedy, writes nothing.

Every call is made twice: as the first of its kind, and after a good one, when it goes to the launch without the full
checks. The launch must refuse it, and the error be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode, runtime
from kernels.decode import api
from tests.decode.cases import DecodeCase, make
from tests.verify.test_errors import misaligned, odd_pitch, transposed

pytestmark = pytest.mark.usefixtures("emulator")

Edit = Callable[[DecodeCase], None]
Row = tuple[str, Edit, type[Exception], tuple[str, ...]]


def put(name: str, change: Callable[[Tensor], Any]) -> Edit:
    """Replace an input of the case; for a guarded buffer, its view."""

    def edit(case: DecodeCase) -> None:
        old = getattr(case, name)
        if name in ("pool", "o"):
            setattr(case, name, dataclasses.replace(old, view=change(old.view)))
        else:
            setattr(case, name, change(old))

    return edit


def every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2)[::2]


def far_rows(x: Tensor) -> Tensor:
    """A pitch of 2^31 elements. The memory between the rows is never touched."""
    x = x[:2]
    far = torch.empty(2**31 + x[0].numel(), dtype=x.dtype, device=x.device)
    view = far.as_strided(x.shape, (2**31, *x.stride()[1:]))
    return view.copy_(x)


def two_far_requests(case: DecodeCase) -> None:
    for name in ("q", "k", "v", "a", "b", "read", "write"):
        setattr(case, name, getattr(case, name)[:2])
    case.k = far_rows(case.k)
    put("o", lambda x: x[:2])(case)


#: (what is wrong, how, the error, what its text must hold). Three requests, H = 2, HV = 4, eight slots, write indices
BAD: tuple[Row, ...] = (
    ("q dtype", put("q", lambda x: x.half()), TypeError, ("q", "float16", "bfloat16", ".to(")),
    ("k dtype", put("k", lambda x: x.float()), TypeError, ("k", "float32", "bfloat16", ".to(")),
    ("v dtype", put("v", lambda x: x.float()), TypeError, ("v", "float32", "bfloat16", ".to(")),
    ("o dtype", put("o", lambda x: x.float()), TypeError, ("o", "float32", "bfloat16", ".to(")),
    ("pool dtype", put("pool", lambda x: x.double()), TypeError, ("ssm_states", "float64", "float32", ".to(")),
    ("integer pool", put("pool", lambda x: x.to(torch.int16)), TypeError, ("ssm_states", "int16", "float32")),
    ("a dtype", put("a", lambda x: x.double()), TypeError, ("a", "float64", "bfloat16", ".to(")),
    ("mixed gate dtypes", put("b", lambda x: x.float()), TypeError, ("b", "float32", "bfloat16", ".to(")),
    ("A_log dtype", put("A_log", lambda x: x.bfloat16()), TypeError, ("A_log", "bfloat16", "float32", ".to(")),
    ("dt_bias dtype", put("dt_bias", lambda x: x.double()), TypeError, ("dt_bias", "float64", "float16", ".to(")),
    ("read dtype", put("read", lambda x: x.long()), TypeError, ("state_indices", "int64", "int32", ".to(")),
    ("write dtype", put("write", lambda x: x.float()), TypeError, ("write_indices", "float32", "int32", ".to(")),
    ("q not a tensor", put("q", lambda x: x.tolist()), TypeError, ("q", "list", "torch.Tensor")),
    ("no k", put("k", lambda x: None), TypeError, ("k", "NoneType", "torch.Tensor")),
    ("no b", put("b", lambda x: None), TypeError, ("b", "NoneType", "torch.Tensor")),
    ("no dt_bias", put("dt_bias", lambda x: None), TypeError, ("dt_bias", "NoneType", "torch.Tensor")),
    ("no read", put("read", lambda x: None), TypeError, ("state_indices", "NoneType", "torch.Tensor")),
    ("write not a tensor", put("write", lambda x: x.tolist()), TypeError, ("write_indices", "list", "torch.Tensor")),
    ("q rank", put("q", lambda x: x[None]), ValueError, ("q", "(1, 3, 2, 128)", "(N, H, K)")),
    ("k heads", put("k", lambda x: x[:, :1]), ValueError, ("k", "(3, 1, 128)", "3, 2, 128")),
    ("k requests", put("k", lambda x: x[:-1]), ValueError, ("k", "(2, 2, 128)", "3, 2, 128")),
    ("k dim", put("k", lambda x: x[..., :64]), ValueError, ("k", "(3, 2, 64)", "3, 2, 128")),
    ("v requests", put("v", lambda x: x[:-1]), ValueError, ("v", "(2, 4, 128)", "3, any")),
    ("v dim", put("v", lambda x: x[..., :64]), ValueError, ("(8, 4, 128, 128)", "any, 4, 64, 128")),
    ("HV not a multiple", put("v", lambda x: x[:, :3]), ValueError, ("3 heads", "2", "multiple")),
    ("no value heads", put("v", lambda x: x[:, :0]), ValueError, ("0 heads", "2", "multiple")),
    ("a shape", put("a", lambda x: x[:, :2]), ValueError, ("a", "(3, 2)", "3, 4")),
    ("b requests", put("b", lambda x: x[:-1]), ValueError, ("b", "(2, 4)", "3, 4")),
    ("A_log shape", put("A_log", lambda x: x[:3]), ValueError, ("A_log", "(3,)", "4")),
    ("dt_bias shape", put("dt_bias", lambda x: x[:, None]), ValueError, ("dt_bias", "(4, 1)", "4")),
    ("pool heads", put("pool", lambda x: x[:, :2]), ValueError, ("ssm_states", "(8, 2, 128, 128)", "4, 128, 128")),
    ("pool K", put("pool", lambda x: x[..., :64]), ValueError, ("ssm_states", "(8, 4, 128, 64)", "4, 128, 128")),
    ("pool rank", put("pool", lambda x: x[0]), ValueError, ("ssm_states", "(4, 128, 128)", "any, 4, 128, 128")),
    ("o shape", put("o", lambda x: x[:-1]), ValueError, ("o", "(2, 4, 128)", "3, 4, 128")),
    ("o rank", put("o", lambda x: x[None]), ValueError, ("o", "(1, 3, 4, 128)", "3, 4, 128")),
    ("read length", put("read", lambda x: x[:-1]), ValueError, ("state_indices", "(2,)", "3")),
    ("write length", put("write", lambda x: x.repeat(2)), ValueError, ("write_indices", "(6,)", "3")),
)  # fmt: skip

#: limits of the SM90 programs; the reference on CPU tensors has none of them
BAD_LAUNCH: tuple[Row, ...] = (
    ("q address", put("q", misaligned), ValueError, ("q", "2 mod 16", "must be 0", "clone()")),
    ("k address", put("k", misaligned), ValueError, ("k", "2 mod 16", "must be 0", "clone()")),
    ("v address", put("v", misaligned), ValueError, ("v", "2 mod 16", "must be 0", "clone()")),
    ("pool address", put("pool", misaligned), ValueError, ("ssm_states", "2 mod 16", "must be 0", "clone()")),
    ("o address", put("o", misaligned), ValueError, ("o", "2 mod 16", "must be 0", "clone()")),
    ("q pitch", put("q", odd_pitch), ValueError, ("q", "259", "multiples of 8", "contiguous()")),
    ("k pitch", put("k", odd_pitch), ValueError, ("k", "259", "multiples of 8", "contiguous()")),
    ("v pitch", put("v", odd_pitch), ValueError, ("v", "515", "multiples of 8", "contiguous()")),
    ("pool pitch", put("pool", odd_pitch), ValueError, ("ssm_states", "65539", "multiples of 8", "contiguous()")),
    ("o pitch", put("o", odd_pitch), ValueError, ("o", "515", "multiples of 8", "contiguous()")),
    ("far k", two_far_requests, ValueError, ("k", "2147483648", "2^31 - 1", "contiguous()")),
    ("q inside", put("q", transposed), ValueError, ("q", "last 2 dimensions", "contiguous()")),
    ("k inside", put("k", transposed), ValueError, ("k", "last 2 dimensions", "contiguous()")),
    ("v inside", put("v", transposed), ValueError, ("v", "last 2 dimensions", "contiguous()")),
    ("pool inside", put("pool", transposed), ValueError, ("ssm_states", "last 3 dimensions", "contiguous()")),
    ("o inside", put("o", transposed), ValueError, ("o", "last 2 dimensions", "contiguous()")),
    ("strided read", put("read", every_second), ValueError, ("state_indices", "(2,)", "contiguous()")),
    ("strided write", put("write", every_second), ValueError, ("write_indices", "(2,)", "contiguous()")),
    ("strided A_log", put("A_log", every_second), ValueError, ("A_log", "(2,)", "contiguous()")),
    ("strided dt_bias", put("dt_bias", every_second), ValueError, ("dt_bias", "(2,)", "contiguous()")),
)  # fmt: skip


@pytest.fixture(params=(False, True), ids=("first call", "known call"))
def launches(
    request: pytest.FixtureRequest, emulator: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The launches that happen; the default call, and with write indices, is known or not."""
    monkeypatch.setattr(api, "_programs", {})
    if request.param:
        for N in (2, 3):
            for moves in (False, True):
                case = make(N, slots=8, moves=moves, device=device)
                case.run()
                case.run_packed()
        assert len(api._programs) >= 4
    happened: list[str] = []
    real = runtime.launch

    def launch(program: runtime.Program, *args: Any) -> None:
        real(program, *args)
        happened.append(program.label)

    monkeypatch.setattr(runtime, "launch", launch)
    return happened


def expect_error(run: Callable[[], Any], error: type[Exception], words: tuple[str, ...], guarded: DecodeCase) -> None:
    with pytest.raises(error) as caught:
        run()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if guarded.q.device.type == "cuda":
        torch.cuda.synchronize()
    assert not guarded.pool.differs().any() and not guarded.o.differs().any(), "a buffer changed"


def low_level(case: DecodeCase) -> Callable[[], None]:
    return lambda: decode.fused_recurrent_gdr_decode_fwd(
        case.q, case.k, case.v, *case.gates, case.pool.view, case.read, case.o.view, case.write, **case.options
    )


@pytest.mark.criterion("2.10", "2.14")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD + BAD_LAUNCH, ids=[row[0] for row in BAD + BAD_LAUNCH])
def test_bad_input(
    name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device, launches: list[str]
) -> None:
    case = make(3, slots=8, moves=True, device=device)
    guarded = dataclasses.replace(case)
    edit(case)
    expect_error(low_level(case), error, words, guarded)
    assert not launches


@pytest.mark.criterion("2.14")
@pytest.mark.parametrize("name", ("k heads", "q inside", "read length", "mixed gate dtypes", "strided A_log"))
def test_the_launch_itself_refuses_a_known_call(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the tests above: such a call does go to the launch without the full checks, and fails there."""
    make(3, slots=8, moves=True, device=device).run()
    failed: list[str] = []
    real = runtime.launch

    def launch(program: runtime.Program, *args: Any) -> None:
        try:
            real(program, *args)
        except Exception as error:
            failed.append(str(error))
            raise

    monkeypatch.setattr(runtime, "launch", launch)
    case = make(3, slots=8, moves=True, device=device)
    guarded = dataclasses.replace(case)
    (row,) = (row for row in BAD + BAD_LAUNCH if row[0] == name)
    row[1](case)
    expect_error(low_level(case), row[2], row[3], guarded)
    assert len(failed) == 1


@pytest.mark.criterion("2.10", "2.14")
@pytest.mark.parametrize("name", ("q", "k", "v", "a", "b", "A_log", "dt_bias", "pool", "read", "write", "o"))
def test_mixed_devices(name: str, device: torch.device, launches: list[str]) -> None:
    other = "meta" if device.type == "cpu" else "cpu"
    case = make(3, slots=8, moves=True, device=device)
    guarded = dataclasses.replace(case)
    put(name, lambda x: x.to(other))(case)
    # all others are compared with q; if q is elsewhere, k is the first that is not there
    said = {"q": "k", "pool": "ssm_states", "read": "state_indices", "write": "write_indices"}.get(name, name)
    where = str(device) if name == "q" else other
    expect_error(low_level(case), ValueError, (f"{said} is on {where}", "move it with", ".to("), guarded)
    assert not launches


@pytest.mark.criterion("2.10")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("K", 256, 128), ("V", 128, 96), ("V", 128, 512)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device, launches: list[str]) -> None:
    value = {"K": K, "V": V}[name]
    limit = "(128,)" if name == "K" else "(64, 128, 256)"
    for packed in (False, True):
        case = make(3, K=K, V=V, device=device)
        run = case.run_packed if packed else case.run
        expect_error(run, ValueError, (f"{name} is {value}", limit, "CPU tensors"), case)
    assert not launches


#: of the rows that hold q, k and v
BAD_ROWS: tuple[Row, ...] = (
    ("not a tensor", put("mixed", lambda x: x.tolist()), TypeError, ("mixed_qkv", "list", "torch.Tensor")),
    ("rank", put("mixed", lambda x: x[None]), ValueError, ("mixed_qkv", "(1, 3, 1024)", "2 dimensions")),
    ("width", put("mixed", lambda x: x[:, :-8]), ValueError, ("mixed_qkv", "1016", "2 H K + HV V", "HV = 4")),
    ("no key head", put("mixed", lambda x: x[:, :512]), ValueError, ("mixed_qkv", "512", "2 H K + HV V")),
    ("three key heads", put("mixed", lambda x: x.repeat(1, 2)[:, :1280]), ValueError, ("4 heads", "3", "multiple")),
    ("requests", put("mixed", lambda x: x[:-1]), ValueError, ("state_indices", "(3,)", "2")),
    ("dtype", put("mixed", lambda x: x.float()), TypeError, ("mixed_qkv", "float32", "bfloat16", ".to(")),
    ("strided columns", put("mixed", transposed), ValueError, ("mixed_qkv", "contiguous()")),
    ("address", put("mixed", misaligned), ValueError, ("mixed_qkv", "2 mod 16", "clone()")),
    ("pitch", put("mixed", odd_pitch), ValueError, ("mixed_qkv", "1027", "multiples of 8", "contiguous()")),
    ("pool rank", put("pool", lambda x: x[0]), ValueError, ("ssm_states", "(4, 128, 128)", "4 dimensions")),
    ("pool not a tensor", put("pool", lambda x: None), TypeError, ("ssm_states", "NoneType", "torch.Tensor")),
    ("o rank", put("o", lambda x: x[:, None]), ValueError, ("o", "(3, 1, 4, 128)", "3, 4, 128")),
    ("o address", put("o", misaligned), ValueError, ("o", "2 mod 16", "clone()")),
)  # fmt: skip


@pytest.mark.criterion("2.10", "2.14")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD_ROWS, ids=[row[0] for row in BAD_ROWS])
def test_bad_packed_rows(
    name: str, edit: Edit, error: type[Exception], words: tuple[str, ...], device: torch.device, launches: list[str]
) -> None:
    case = make(3, slots=8, moves=True, device=device)
    guarded = dataclasses.replace(case)
    edit(case)
    expect_error(case.run_packed, error, words, guarded)
    assert not launches


#: arguments of the public function that the low-level one never sees
BAD_PUBLIC: tuple[tuple[str, dict[str, Callable[[Tensor], Any]], type[Exception], tuple[str, ...]], ...] = (
    ("two batch rows", {"q": lambda x: x.expand(2, 3, 2, 128)}, ValueError, ("q", "leading 1", "pack")),
    ("rank of q", {"q": lambda x: x[0]}, ValueError, ("q", "(2, 128)", "3 dimensions")),
    ("rank of a", {"q": lambda x: x[None], "a": lambda x: x[:, :, None]}, ValueError, ("a", "(3, 4, 1)", "leading 1")),
    ("v not a tensor", {"v": lambda x: x.tolist()}, TypeError, ("v", "list", "torch.Tensor")),
    ("q not a tensor", {"q": lambda x: None}, TypeError, ("q", "NoneType", "torch.Tensor")),
    ("v rank", {"v": lambda x: x[0]}, ValueError, ("v", "(4, 128)", "3 dimensions")),
)  # fmt: skip


@pytest.mark.criterion("2.10")
@pytest.mark.parametrize(("name", "changes", "error", "words"), BAD_PUBLIC, ids=[row[0] for row in BAD_PUBLIC])
def test_bad_public_arguments(
    name: str, changes: dict[str, Callable[[Tensor], Any]], error: type[Exception], words: tuple[str, ...],
    device: torch.device, launches: list[str],
) -> None:  # fmt: skip
    case = make(3, slots=8, device=device)
    arguments = {x: getattr(case, x) for x in ("A_log", "a", "dt_bias", "q", "k", "v", "b")}
    arguments |= {x: change(arguments[x]) for x, change in changes.items()}

    def run() -> None:
        decode.recurrent_gated_delta_rule_decode(**arguments, ssm_states=case.pool.view, cache_indices=case.read)

    expect_error(run, error, words, case)
    assert not launches
