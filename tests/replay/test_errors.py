"""Gate 5: bad input raises before any launch, names value, limit and remedy, and leaves every buffer untouched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kernels import runtime
from kernels.replay import contract
from tests.gate_engine import Evidence
from tests.replay.cases import Case, check_memory, make, run, split
from tests.verify.test_errors import BAD as BAD_VERIFY
from tests.verify.test_errors import BAD_LAUNCH as BAD_LAUNCH_VERIFY
from tests.verify.test_errors import put, untouched

Words = tuple[str, ...]

#: of verify's bad inputs those that have nothing to do with its snapshots and variants
NOT_HERE = (
    "states dtype", "row index dtype", "states rank", "too few rows", "steps < T", "cache_steps > D",
    "cache_steps < 0", "head_batch beyond the group", "head_batch of 3", "heads, lossless", "token tree",
    "states not contiguous inside",
)  # fmt: skip
BAD = tuple(row for row in BAD_VERIFY + BAD_LAUNCH_VERIFY if row[0] not in NOT_HERE)

#: max_tokens, what the error must say
BOUNDS: tuple[tuple[int, Words], ...] = (
    (
        17,
        ("max_tokens is 17", "at most 16", "recurrent_gated_delta_rule_verify", "negative intermediate_state_indices"),
    ),
    (0, ("max_tokens is 0", "between 1 and 16")),
    (-1, ("max_tokens is -1", "between 1 and 16")),
    (11, ("24 tokens in 2 requests", "max_tokens = 11", "max_tokens=12")),
)


@pytest.fixture
def nothing_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(runtime, "cpu_launcher", refuse)
    monkeypatch.setattr(runtime, "executable", lambda program: refuse)


def expect_error(
    case: Case, edit: Callable[[Case], None], error: type[Exception], words: Words, max_tokens: int = 16
) -> None:
    guarded = dataclasses.replace(case)
    edit(case)
    with pytest.raises(error) as caught:
        run(case, max_tokens)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert untouched(guarded), "a buffer changed"


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad_input(
    name: str, edit: Callable[[Case], None], error: type[Exception], words: Words, device: torch.device
) -> None:
    expect_error(make(N=2, T=12, device=device), edit, error, words)


@pytest.mark.criterion("5.11")
def test_the_excluded_cases_exist() -> None:
    assert set(NOT_HERE) <= {row[0] for row in BAD_VERIFY + BAD_LAUNCH_VERIFY} and len(BAD) >= 22


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("max_tokens", "words"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_bound_on_tokens(max_tokens: int, words: Words, device: torch.device) -> None:
    expect_error(make(N=2, T=12, device=device), lambda case: None, ValueError, words, max_tokens)


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
def test_more_tokens_than_the_program_takes(device: torch.device) -> None:
    words = ("34 tokens in 2 requests", "max_tokens = 16", "more than 16", "recurrent_gated_delta_rule_verify")
    expect_error(make(N=2, T=17, device=device), lambda case: None, ValueError, words)


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("K", 256, 128), ("V", 128, 96)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device) -> None:
    value = {"K": K, "V": V}[name]
    words = (f"{name} is {value}", "CPU tensors")
    expect_error(make(K=K, V=V, device=device), lambda case: None, ValueError, words)


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(
    ("cu_seqlens", "max_tokens", "words"),
    (
        ((0, 13, 12), 16, ("never decrease",)),
        ((0, -2, 24), 16, ("never decrease",)),
        ((1, 12, 24), 16, ("start at 0",)),
        ((0, 12, 25), 16, ("at most at 24",)),
        ((0, 10, 24), 12, ("14 tokens", "max_tokens is 12", "max_tokens=14")),
        ((0, 4, 24), 16, ("20 tokens", "max_tokens is 16", "recurrent_gated_delta_rule_verify")),
    ),
)
def test_bad_cu_seqlens_on_the_host(cu_seqlens: tuple[int, ...], max_tokens: int, words: Words) -> None:
    """On a device these values cannot be read without a synchronisation; there they are memory-safe instead."""
    edit = put("cu_seqlens", lambda x: torch.tensor(cu_seqlens, dtype=x.dtype))
    expect_error(make(N=2, T=12), edit, ValueError, words, max_tokens)


@pytest.mark.criterion("5.11")
@pytest.mark.usefixtures("nothing_launches")
def test_mixed_devices(device: torch.device) -> None:
    other = "meta" if device.type == "cpu" else "cpu"
    expect_error(make(device=device), put("k", lambda x: x.to(other)), ValueError, ("k is on", other, "move it"))


@pytest.mark.criterion("5.12")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("ctas", (None, 3))
@pytest.mark.parametrize(
    "cu_seqlens",
    ((0, 30, 12), (0, -5, 24), (-7, 12, 24), (0, 12, 2**31 - 1), (2**31 - 1, 0, 24), (0, 0, 24), (24, 24, 24)),
    ids=str,
)
def test_senseless_lengths_are_memory_safe(
    cu_seqlens: tuple[int, ...],
    ctas: int | None,
    device: torch.device,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the host would refuse, as a device would see it: the values of these outputs mean nothing."""
    monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
    split(monkeypatch, ctas)
    case = make(T=(12, 12), pitched=True, device=device)
    case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    run(case)
    check_memory(case)
    evidence.equal("changed pool elements", int(case.pool.differs().sum()), 0)
