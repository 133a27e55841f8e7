"""Gate 5: bad input of the ring raises before any launch and leaves every buffer untouched; senseless lengths on a
device are memory-safe; CPU tensors compute the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.replay import contract, ring
from tests.gate_engine import Evidence
from tests.replay.ring_cases import KEPT, Server, same, split
from tests.replay.test_errors import nothing_launches
from tests.verify.cases import relative_l2
from tests.verify.test_errors import misaligned, odd_pitch, transposed

__all__ = ["nothing_launches"]

Words = tuple[str, ...]
Arguments = dict[str, Any]
Edit = Callable[[Arguments], None]


def put(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(arguments: Arguments) -> None:
        arguments[name] = change(arguments[name])

    return edit


def window(**fields: Callable[[Any], Any]) -> Edit:
    """Replace fields of the window."""

    def edit(arguments: Arguments) -> None:
        old = arguments["window"]
        changed = {name: change(getattr(old, name)) for name, change in fields.items()}
        arguments["window"] = dataclasses.replace(old, **changed)

    return edit


def strided(x: Tensor) -> Tensor:
    return x.repeat(2)[::2]


def with_gaps(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=1)[:, : x.shape[1]]


ALLOCATE = "allocate the window for this pool"
SLOTS = "cache_indices"

#: (what is wrong, how, the error, what its text must hold) of a verify of two requests with 4 tokens each
BAD_VERIFY: tuple[tuple[str, Edit, type[Exception], Words], ...] = (
    ("q dtype", put("q", Tensor.half), TypeError, ("q", "float16", "bfloat16", ".to(")),
    ("v dtype", put("v", Tensor.float), TypeError, ("v", "float32", "bfloat16")),
    ("o dtype", put("o", Tensor.float), TypeError, ("o", "float32", "bfloat16")),
    ("pool dtype", put("ssm_states", Tensor.double), TypeError, ("ssm_states", "float64", "bfloat16")),
    ("a dtype", put("a", Tensor.double), TypeError, ("a", "float64", "bfloat16")),
    ("mixed gate dtypes", put("b", Tensor.float), TypeError, ("b", "float32", "bfloat16")),
    ("A_log dtype", put("A_log", Tensor.bfloat16), TypeError, ("A_log", "bfloat16", "float32")),
    ("dt_bias dtype", put("dt_bias", Tensor.double), TypeError, ("dt_bias", "float64", "bfloat16")),
    ("slot dtype", put(SLOTS, Tensor.long), TypeError, ("int64", "int32")),
    ("start dtype", put("query_start_loc", Tensor.long), TypeError, ("int64", "int32")),
    ("q not a tensor", put("q", Tensor.tolist), TypeError, ("q", "list", "torch.Tensor")),
    ("k tokens", put("k", lambda x: x[:-1]), ValueError, ("k", "(7, 2, 128)", "8, 2, 128")),
    ("k heads", put("k", lambda x: x[:, :1]), ValueError, ("k", "(8, 1, 128)", "8, 2, 128")),
    ("v tokens", put("v", lambda x: x[:-1]), ValueError, ("v", "(7, 4, 128)", "8")),
    ("HV not a multiple", put("v", lambda x: x[:, :3]), ValueError, ("3 heads", "2", "multiple")),
    ("two batch rows", put("q", lambda x: x.reshape(2, -1, 2, 128)), ValueError, ("q", "leading 1", "pack")),
    ("a shape", put("a", lambda x: x[:, :2]), ValueError, ("a", "(8, 2)", "8, 4")),
    ("dt_bias shape", put("dt_bias", lambda x: x[:3]), ValueError, ("dt_bias", "(3,)", "4")),
    ("pool heads", put("ssm_states", lambda x: x[:, :2]), ValueError, ("ssm_states", "(4, 2, 128, 128)", "4, 128")),
    ("o shape", put("o", lambda x: x[:-1]), ValueError, ("o", "(7, 4, 128)", "8, 4, 128")),
    ("start length", put("query_start_loc", lambda x: x[:-1]), ValueError, ("(2,)", "3")),
    ("strided slots", put(SLOTS, strided), ValueError, ("contiguous",)),
    ("window k dtype", window(k=Tensor.float), ValueError, ("window.k", "float32", "bfloat16", ALLOCATE)),
    ("window v dtype", window(v=Tensor.half), ValueError, ("window.v", "float16", "bfloat16", ALLOCATE)),
    ("window gate dtype", window(a=Tensor.float, b=Tensor.float), ValueError, ("window.a", "float32", "bfloat16")),
    ("window b dtype", window(b=Tensor.float), ValueError, ("window.b", "float32", "bfloat16", ALLOCATE)),
    ("cursors dtype", window(cursors=Tensor.long), ValueError, ("window.cursors", "int64", "int32", ALLOCATE)),
    ("marks dtype", window(marks=Tensor.long), ValueError, ("window.marks", "int64", "int32", ALLOCATE)),
    ("window of fewer slots", window(k=lambda x: x[:3]), ValueError, ("window.k", "(3, 15, 2, 128)", "(4, 15, 2")),
    ("window v of fewer rows", window(v=with_gaps), ValueError, ("window.v", "contiguous", ALLOCATE)),
    ("window b rows", window(b=lambda x: x[:, :-1].contiguous()), ValueError, ("window.b", "(4, 14, 4)", "(4, 15, 4)")),
    ("window heads", window(k=lambda x: x[:, :, :1].contiguous()), ValueError, ("window.k", "(4, 15, 1, 128)")),
    ("cursor slots", window(cursors=lambda x: x[:3]), ValueError, ("window.cursors", "(3, 4)", "(4, 4)")),
    ("mark parts", window(marks=lambda x: x[..., :1].contiguous()), ValueError, ("window.marks", "(4, 4, 1)")),
    ("window on another device", window(k=lambda x: x.to("meta")), ValueError, ("window.k", "meta", ALLOCATE)),
    ("capacity beyond the rows", window(capacity=lambda x: 9), ValueError, ("15 rows", "capacity 9", "need 22")),
    ("max_tokens beyond the rows", window(max_tokens=lambda x: 6), ValueError, ("15 rows", "max_tokens 6", "need 18")),
    ("max_tokens beyond the program", window(max_tokens=lambda x: 17), ValueError, ("17", "51")),
    ("fewer max_tokens", window(max_tokens=lambda x: 2), ValueError, ("8 tokens in 2", "max_tokens = 2", "=4")),
    # limits of the SM90 program
    ("q address", put("q", misaligned), ValueError, ("q", "mod 16", "clone()")),
    ("k token pitch", put("k", odd_pitch), ValueError, ("k", "multiples of 8", "contiguous()")),
    ("v not contiguous inside", put("v", transposed), ValueError, ("v", "contiguous")),
    ("o token pitch", put("o", odd_pitch), ValueError, ("o", "multiples of 8", "contiguous()")),
    ("pool not contiguous inside", put("ssm_states", transposed), ValueError, ("ssm_states", "contiguous()")),
    ("pool slot pitch", put("ssm_states", odd_pitch), ValueError, ("ssm_states", "multiples of 8")),
)  # fmt: skip

#: the same of an accept
BAD_ACCEPT: tuple[tuple[str, Edit, type[Exception], Words], ...] = (
    ("slot dtype", put(SLOTS, Tensor.long), TypeError, (SLOTS, "int64", "int32")),
    ("slots not a tensor", put(SLOTS, Tensor.tolist), TypeError, (SLOTS, "list", "torch.Tensor")),
    ("slots rank", put(SLOTS, lambda x: x[None]), ValueError, (SLOTS, "(1, 2)")),
    ("strided slots", put(SLOTS, strided), ValueError, (SLOTS, "contiguous")),
    ("accepted dtype", put("accepted_lengths", Tensor.long), TypeError, ("accepted_lengths", "int64", "int32")),
    ("accepted not a tensor", put("accepted_lengths", Tensor.tolist), TypeError, ("accepted_lengths", "list")),
    ("too few accepted", put("accepted_lengths", lambda x: x[:1]), ValueError, ("accepted_lengths", "(1,)", "2")),
    ("accepted rank", put("accepted_lengths", lambda x: x[:, None]), ValueError, ("accepted_lengths", "(2, 1)")),
    ("strided accepted", put("accepted_lengths", strided), ValueError, ("accepted_lengths", "contiguous")),
    ("accepted elsewhere", put("accepted_lengths", lambda x: x.to("meta")), ValueError, ("on meta", "move it")),
    ("slots elsewhere", put(SLOTS, lambda x: x.to("meta")), ValueError, ("on meta", "move it")),
)  # fmt: skip
OF_SLOTS = tuple(row for row in BAD_ACCEPT if "slots" in row[0] or "slot " in row[0])


def arguments(device: torch.device) -> tuple[Server, Arguments]:
    """Of a verify; two slots of the four have a history, one of them has tokens to fold."""
    server = Server(N=2, max_tokens=3, capacity=6, device=device)
    x = server.tokens(8)
    given: Arguments = {name: getattr(x, name) for name in ("q", *KEPT)}
    given |= {"A_log": server.A_log, "dt_bias": server.dt_bias, "ssm_states": server.pool.view}
    given |= {SLOTS: server.indices(server.slots), "query_start_loc": server.indices([0, 4, 8])}
    server.window = dataclasses.replace(server.window, max_tokens=4, capacity=5)  # of 15 rows
    return server, given | {"window": server.window, "o": torch.full_like(x.v, 7.0)}


def untouched(server: Server, before: ring.Window, o: Tensor) -> bool:
    names = [field.name for field in dataclasses.fields(before) if isinstance(getattr(before, field.name), Tensor)]
    kept = all(same(getattr(before, name), getattr(server.window, name)) for name in names)
    return kept and not server.pool.differs().any() and bool((o == 7.0).all())


def copied(x: ring.Window) -> ring.Window:
    names = [field.name for field in dataclasses.fields(x) if isinstance(getattr(x, field.name), Tensor)]
    return dataclasses.replace(x, **{name: getattr(x, name).clone() for name in names})


def expect_error(call: Callable[[], object], error: type[Exception], words: Words) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD_VERIFY, ids=[row[0] for row in BAD_VERIFY])
def test_bad_verify(name: str, edit: Edit, error: type[Exception], words: Words, device: torch.device) -> None:
    server, given = arguments(device)
    before, o = copied(server.window), given["o"]
    edit(given)
    expect_error(lambda: ring.verify(**given), error, words)
    assert untouched(server, before, o), "a buffer changed"


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
def test_decreasing_starts_on_the_host() -> None:
    """On a device these values cannot be read without a synchronisation."""
    _, given = arguments(torch.device("cpu"))
    given["query_start_loc"] = given["query_start_loc"][[0, 2, 1]]
    expect_error(lambda: ring.verify(**given), ValueError, ("never decrease",))


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD_ACCEPT, ids=[row[0] for row in BAD_ACCEPT])
def test_bad_accept(name: str, edit: Edit, error: type[Exception], words: Words, device: torch.device) -> None:
    server, every = arguments(device)
    given = {"window": server.window, SLOTS: every[SLOTS], "accepted_lengths": server.indices([1, 2])}
    before = copied(server.window)
    edit(given)
    expect_error(lambda: ring.accept(**given), error, words)
    assert untouched(server, before, every["o"]), "a buffer changed"


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "edit", "error", "words"), OF_SLOTS, ids=[row[0] for row in OF_SLOTS])
@pytest.mark.parametrize("function", ("reset", "flush"))
def test_bad_slots(
    function: str, name: str, edit: Edit, error: type[Exception], words: Words, device: torch.device
) -> None:
    server, every = arguments(device)
    given = {"window": server.window, SLOTS: every[SLOTS]}
    if function == "flush":
        given |= {x: every[x] for x in ("A_log", "dt_bias", "ssm_states")}
    before = copied(server.window)
    edit(given)
    expect_error(lambda: getattr(ring, function)(**given), error, words)
    assert untouched(server, before, every["o"]), "a buffer changed"


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
def test_flush_checks_the_window(device: torch.device) -> None:
    """That it is of this pool."""
    server, given = arguments(device)
    before = copied(server.window)
    pool = given["ssm_states"][:3]
    expect_error(
        lambda: ring.flush(server.A_log, server.dt_bias, pool, given[SLOTS], server.window), ValueError,
        ("window.k", "(4, 15, 2, 128)", "(3, 15, 2, 128)", ALLOCATE),
    )  # fmt: skip
    assert untouched(server, before, given["o"])


@pytest.mark.criterion("5.33")
@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"max_tokens": 0}, ("max_tokens is 0", "between 1 and 16", "pass 16")),
        ({"max_tokens": 17}, ("max_tokens is 17", "between 1 and 16")),
        ({"capacity": -1}, ("capacity is -1", "between 0 and 16")),
        ({"capacity": 17}, ("capacity is 17", "between 0 and 16", "pass 16")),
    ),
    ids=str,
)
def test_bad_sizes(options: dict[str, Any], words: Words, device: torch.device) -> None:
    pool = torch.zeros(2, 4, 128, 128, device=device)
    expect_error(lambda: ring.Window.allocate(pool, 2, **options), ValueError, words)


@pytest.mark.criterion("5.33")
@pytest.mark.parametrize("pool", (torch.zeros(4, 128, 128), [1.0]), ids=("rank", "list"))
def test_a_window_is_of_a_pool(pool: Any) -> None:
    expect_error(
        lambda: ring.Window.allocate(pool, 2), ValueError, ("ssm_states", "(slots, HV, V, K)", "pass the pool")
    )


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("V", 128, 96)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device) -> None:
    server = Server(N=1, K=K, V=V, device=device)
    expect_error(lambda: server.call([3]), ValueError, (f"{name} is {dict(K=K, V=V)[name]}", "CPU tensors"))
    assert not server.pool.differs().any()


@pytest.mark.criterion("5.33")
@pytest.mark.parametrize("name", ("k", "v", "a", "A_log", "dt_bias", "ssm_states", SLOTS, "query_start_loc", "o"))
@pytest.mark.usefixtures("nothing_launches")
def test_mixed_devices(name: str, device: torch.device) -> None:
    server, given = arguments(device)
    before, o = copied(server.window), given["o"]
    other = "meta" if device.type == "cpu" else "cpu"
    given[name] = given[name].to(other)
    expect_error(lambda: ring.verify(**given), ValueError, (f"on {other}", "move it"))
    assert untouched(server, before, o), "a buffer changed"


#: query_start_loc of two requests with 8 tokens, as a device might hold it
SENSELESS = ((0, 30, 4), (0, -5, 8), (-7, 4, 8), (0, 4, 2**31 - 1), (2**31 - 1, 0, 8), (0, 2**31 - 1, -(2**31)))


@pytest.mark.criterion("5.33")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("ctas", (None, 3))
@pytest.mark.parametrize("starts", SENSELESS, ids=str)
def test_senseless_lengths_are_memory_safe(
    starts: Sequence[int], ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host would refuse, as a device would see it: nothing is written but to o and what the slots of these
    requests keep, and other slots go on."""
    split(monkeypatch, ctas)
    server = Server(N=3, slots=4, max_tokens=4, capacity=3, pitched=True, device=device)
    for _ in range(2):
        server.step([4] * 3, accept=False)
        server.accept([3, 1, 2])
    monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
    x, o = server.tokens(8), torch.full((10, 4, 128), 7.0, dtype=torch.bfloat16, device=device)
    w, y, z = server.slots
    before = copied(server.window)
    ring.verify(
        server.A_log, x.a, server.dt_bias, x.q, x.k, x.v, x.b, server.pool.view, server.indices([w, y]),
        server.indices(starts), server.window, o=o[1:9],
    )  # fmt: skip
    assert (o[0] == 7.0).all() and (o[9] == 7.0).all() and server.pool.gaps_intact()
    others = [slot for slot in range(4) if slot not in (w, y)]
    for name in (*KEPT, "cursors", "marks"):
        assert same(getattr(before, name)[others], getattr(server.window, name)[others]), f"{name} of others changed"
    assert same(before.cursors, server.window.cursors)
    server.step([4], evidence, slots=[z])


@pytest.mark.criterion("5.33")
@pytest.mark.parametrize(("H", "HV", "K", "V"), ((2, 4, 128, 128), (1, 3, 16, 24), (2, 2, 96, 32)))
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_reference_path(H: int, HV: int, K: int, V: int, pool: torch.dtype, evidence: Evidence) -> None:
    server = Server(
        N=4, max_tokens=5, capacity=3, H=H, HV=HV, K=K, V=V, pool=pool, pitched=True, bias=torch.float16,
        allow_neg_eigval=True,
    )  # fmt: skip
    for _ in range(6):
        lengths = server.lengths(2)
        server.step([*lengths[:3], 2, lengths[3]], evidence, tail=2, slots=[*server.slots[:3], -1, server.slots[3]])
        server.forget()
    evidence.at_least("folds", server.folds, 3)


@pytest.mark.criterion("5.33")
def test_fp64_stays_fp64(evidence: Evidence) -> None:
    rng = torch.Generator().manual_seed(0)
    state = torch.randn(1, 2, 16, 16, generator=rng, dtype=torch.float64)
    window = ring.Window.allocate(state, 1, max_tokens=4, capacity=3, dtype=torch.float64, gate_dtype=torch.float64)
    server = Server(N=1, H=1, HV=2, K=16, V=16)
    server.A_log, server.dt_bias = server.A_log.double(), server.dt_bias.double()
    every, first = server.tokens(16), state[0].clone()
    slots, starts = server.indices([0]), server.indices([0, 4])
    q, k, v, a, b = (getattr(every, name).double() for name in ("q", *KEPT))
    outputs = []
    for step in range(4):
        new = slice(4 * step, 4 * step + 4)
        outputs.append(
            ring.verify(
                server.A_log, a[new], server.dt_bias, q[new], k[new], v[new], b[new], state, slots, starts, window
            )
        )
        ring.accept(window, slots, server.indices([4]))
    ring.flush(server.A_log, server.dt_bias, state, slots, window)
    o, states = server.exact(every, first)
    assert torch.cat(outputs).dtype == torch.float64
    evidence.at_most("o of fp64 inputs, relative L2", relative_l2(torch.cat(outputs), o), 1e-14)
    evidence.at_most("a state of fp64, relative L2", relative_l2(state[0], states[-1]), 1e-14)


@pytest.mark.criterion("5.33")
def test_batched_shapes_and_allocated_output() -> None:
    """With a leading 1, and without o."""
    servers, found = (Server(N=2, max_tokens=4), Server(N=2, max_tokens=4)), []
    for server, batched in zip(servers, (False, True), strict=True):
        x = server.tokens(7)
        a, q, k, v, b = (t[None] if batched else t for t in (x.a, x.q, x.k, x.v, x.b))
        o = ring.verify(
            server.A_log, a, server.dt_bias, q, k, v, b, server.pool.view, server.indices(server.slots),
            server.indices([0, 4, 7]), server.window,
        )  # fmt: skip
        assert o.shape == v.shape and o.dtype == x.v.dtype
        found.append(o[0] if batched else o)
    assert torch.equal(*found)
    assert all(same(getattr(servers[0].window, n), getattr(servers[1].window, n)) for n in KEPT)
