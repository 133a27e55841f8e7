"""Gate 2, paged decode: padding, write indices, shared slots, strides, packed rows, public shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode
from tests.decode.cases import (
    INT_MAX,
    INT_MIN,
    DecodeCase,
    check,
    make,
    most_requests_of_the_small_tile,
    set_slots,
)
from tests.gate_engine import Evidence
from tests.launch import watch
from tests.verify.cases import Buffer
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")

#: of both tiles, with the default heads and a bf16 pool
SIZES = (7, most_requests_of_the_small_tile() + 1)
VALUES = (torch.nan, torch.inf, -torch.inf, torch.nan)


def spoil(case: DecodeCase, slots: tuple[int, ...]) -> None:
    """The inputs of the padding of `case`, its first requests and its last one, and `slots` hold NaN and Inf."""
    for n, value in zip((0, 1, 2, 3, -1), (*VALUES, torch.inf), strict=True):
        for x in (case.mixed, case.a, case.b):
            x[n] = value
    for slot in slots:
        case.pool.view[slot] = VALUES[slot % 4]
    case.pool.before.copy_(case.pool.storage)


@pytest.mark.criterion("2.4")
@pytest.mark.parametrize("packed", (False, True), ids=("separate", "packed"))
@pytest.mark.parametrize("moves", (False, True), ids=("in place", "moves"))
@pytest.mark.parametrize("N", SIZES)
def test_padding_is_inert(N: int, moves: bool, packed: bool, device: torch.device, evidence: Evidence) -> None:
    """NaN and Inf everywhere that padding could touch: its inputs, the slots at the ends of the pool."""
    case = make(N, slots=2 * N + 4, moves=moves, device=device)
    slots = len(case.pool.view)
    ends = (0, 1, slots - 2, slots - 1)
    set_slots(case.read, *range(2, 2 + N))
    set_slots(case.read, -1, slots, INT_MIN, INT_MAX)
    case.read[-1] = slots + 1
    if case.write is not None:
        set_slots(case.write, *ends, *range(2 + N, 2 * N - 2))  # padding has slots that it could write
    spoil(case, ends)
    if packed:
        case.run_packed()
    else:
        case.run()
    check(case, evidence)
    assert not case.o.view[[0, 1, 2, 3, -1]].any()
    assert not case.pool.changed()[list(ends)].any()


@pytest.mark.criterion("2.4")
@pytest.mark.parametrize("N", SIZES)
def test_writes_beyond_the_pool_store_nothing(N: int, device: torch.device, evidence: Evidence) -> None:
    case = make(N, moves=True, pitched=True, device=device)
    assert case.write is not None
    set_slots(case.write, -1, len(case.pool.view), INT_MIN, INT_MAX)
    case.run()
    check(case, evidence)  # the outputs too
    everything = make(N, moves=True, pitched=True, device=device)
    assert everything.write is not None
    everything.write[:] = -1
    everything.run()
    check(everything, evidence)
    assert not everything.pool.changed().any()


@pytest.mark.criterion("2.4")
@pytest.mark.parametrize("N", SIZES)
def test_a_dummy_slot_disturbs_nobody(N: int, device: torch.device, evidence: Evidence) -> None:
    """Every third request reads and writes slot 0: the bits of all others are those of a call without them."""
    case, alone = (make(N, pitched=True, device=device) for _ in range(2))
    for each in (case, alone):
        each.read[each.read == 0] = N + 1  # slots 0 and N + 1 are nobody's
    dummies = torch.arange(0, N, 3, device=device)
    case.read[dummies], alone.read[dummies] = 0, -1
    case.run()
    alone.run()
    check(case, evidence)
    others = [n for n in range(N) if n % 3]
    evidence.equal(
        "output elements of others that a dummy slot changes", different(case.o.view[others], alone.o.view[others]), 0
    )
    evidence.equal("elements of their slots that it changes", different(case.pool.view[1:], alone.pool.view[1:]), 0)


def own_pitch(x: Tensor, gap: int) -> Tensor:
    """x with `gap` elements between its rows."""
    return Buffer.make(x, (gap,)).view


@pytest.mark.criterion("2.6")
@pytest.mark.parametrize("N", SIZES)
def test_every_pitch_is_its_own(
    N: int, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q, k, v, o, pool, a and b each with another pitch; the launch gets the very tensors."""
    case = make(N, device=device)
    case.q, case.k, case.v = own_pitch(case.q, 8), own_pitch(case.k, 24), own_pitch(case.v, 40)
    case.a = case.a.T.contiguous().T
    case.b = Buffer.make(case.b, (5,)).view
    case.o = Buffer.make(case.o.view, (56,))
    case.pool = Buffer.make(case.pool.view, (8 * 9,))
    tensors = (case.q, case.k, case.v, case.o.view, case.pool.view, case.b)
    assert len({x.stride(0) for x in tensors}) == len(tensors) and case.a.stride() == (1, N)
    launched = watch(monkeypatch)
    case.run()
    check(case, evidence)
    ((_, args),) = launched
    addresses = {x.data_ptr() for x in args if isinstance(x, Tensor)}
    assert addresses == {x.data_ptr() for x in (*tensors, case.a, case.A_log, case.dt_bias, case.read)}


@pytest.mark.criterion("2.6")
def test_one_row_for_all_requests(device: torch.device, evidence: Evidence) -> None:
    """Inputs may be expanded: a stride of 0."""
    case = make(5, device=device)
    case.q, case.k, case.v = (x[:1].expand(x.shape) for x in (case.q, case.k, case.v))
    case.a, case.b = case.a[:1].expand(case.a.shape), case.b[:, :1].expand(case.b.shape)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("2.6")
def test_open_strides_of_single_elements(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones, without a copy."""
    for _ in range(2):  # the first call and a known one
        case = make(1, 1, 1, V=64, slots=1, moves=True, device=device, use_qk_l2norm_in_kernel=False)
        case.read[:] = 0
        case.write = torch.zeros_like(case.read)
        for name in ("q", "k", "v"):
            x = getattr(case, name)
            setattr(case, name, x.as_strided(x.shape, (3, 5, 1)))
        for buffer in (case.pool, case.o):
            shape = buffer.view.shape
            odd = [7 if size == 1 else stride for size, stride in zip(shape, buffer.view.stride(), strict=True)]
            buffer.view = buffer.view.as_strided(shape, odd)
        for name in ("read", "write", "A_log", "dt_bias"):
            setattr(case, name, getattr(case, name).as_strided((1,), (9,)))
        with monkeypatch.context() as context:
            launched = watch(context)
            case.run()
        o, pool = case.expected()
        case.o.view, case.pool.view = case.o.view.view(1, 1, 64), case.pool.view.view(1, 1, 64, 128)
        check(case, evidence, (o, pool))
        _, args = launched[-1]
        for x in args:
            if isinstance(x, Tensor) and x.dim() > 2:
                assert x.stride() == torch.empty(x.shape).stride(), "the launch promises this"
        assert args[0].data_ptr() == case.q.data_ptr()


PACKED: tuple[dict[str, Any], ...] = (
    {"N": SIZES[0], "pitched": True},
    {"N": SIZES[1], "pitched": True},
    {"N": SIZES[0], "moves": True},
    {"N": SIZES[1], "moves": True, "pitched": True},
)


@pytest.mark.criterion("2.6")
@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_rows_have_the_bits_of_separate_ones(
    options: dict[str, Any], device: torch.device, evidence: Evidence
) -> None:
    for seed in range(3 if device.type == "cpu" else 50):
        packed, separate = (make(seed=seed, device=device, **options) for _ in range(2))
        set_slots(packed.read, -1)
        set_slots(separate.read, -1)
        separate.q, separate.k, separate.v = (x.contiguous() for x in (separate.q, separate.k, separate.v))
        packed.run_packed()
        separate.run()
        check(packed, evidence)
        evidence.equal("o: elements that differ", different(packed.o.view, separate.o.view), 0)
        evidence.equal("pool: elements that differ", different(packed.pool.view, separate.pool.view), 0)


@pytest.mark.criterion("2.6")
def test_public_shapes(device: torch.device) -> None:
    """With or without a leading 1, with or without o: the same bits, in the tensor that was given if one was."""
    N = SIZES[0]
    want = make(N, device=device)
    want.run()

    def public(case: DecodeCase, lead: bool, o: Tensor | None) -> Tensor:
        a, q, k, v, b = (x[None] if lead else x for x in (case.a, case.q, case.k, case.v, case.b))
        rest = (case.pool.view, case.read)
        return decode.recurrent_gated_delta_rule_decode(case.A_log, a, case.dt_bias, q, k, v, b, *rest, o=o)

    def mixed(case: DecodeCase, lead: bool, o: Tensor | None) -> Tensor:
        rest = (case.pool.view, case.read)
        return decode.packed_recurrent_gated_delta_rule_decode(case.mixed, *case.gates, *rest, o=o)

    for function in (public, mixed):
        for lead in (False, True):
            for given in (False, True):
                case = make(N, device=device)
                view = case.o.view[None] if lead else case.o.view
                o = function(case, lead, view if given else None)
                assert o is view if given else o.dtype == torch.bfloat16
                if not given:
                    assert o.shape == ((1, N, 4, 128) if lead or function is mixed else (N, 4, 128))
                assert not different(o.reshape(want.o.view.shape), want.o.view)
                assert not different(case.pool.view, want.pool.view)


@pytest.mark.criterion("2.1", "2.4")
@pytest.mark.parametrize("known", (False, True), ids=("first call", "known call"))
def test_no_requests_and_no_slots(known: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if known:
        for moves in (False, True):
            case = make(3, moves=moves, device=device)
            case.run()
            case.run_packed()
    launched = watch(monkeypatch)
    for moves in (False, True):
        for N, slots in ((0, 3), (0, 0), (3, 0)):
            for packed in (False, True):
                case = make(N, slots=slots, device=device)
                case.read = torch.zeros(N, dtype=torch.int32, device=device)
                case.write = case.read.clone() if moves else None
                if packed:
                    case.run_packed()
                else:
                    case.run()
                assert not case.o.view.any() and case.o.gaps_intact()
                assert not case.pool.differs().any()
    assert not launched
