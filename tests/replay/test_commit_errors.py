"""Gate 5: bad input of commit raises before any launch and leaves every buffer untouched; senseless lengths write
nothing outside of the target slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.replay import contract
from tests.gate_engine import Evidence
from tests.replay.commit_cases import Commit, check_others, elsewhere, make, run, split
from tests.replay.test_errors import BOUNDS, nothing_launches
from tests.verify.cases import Case
from tests.verify.test_errors import misaligned, odd_pitch, put, transposed, untouched

__all__ = ["nothing_launches"]

Words = tuple[str, ...]

#: (what is wrong, how, the error, what its text must hold)
BAD: tuple[tuple[str, Callable[[Case], None], type[Exception], Words], ...] = (
    ("k dtype", put("k", lambda x: x.half()), TypeError, ("k", "float16", "bfloat16", ".to(")),
    ("v dtype", put("v", lambda x: x.float()), TypeError, ("v", "float32", "bfloat16")),
    ("pool dtype", put("pool", lambda x: x.double()), TypeError, ("ssm_states", "float64", "bfloat16")),
    ("a dtype", put("a", lambda x: x.double()), TypeError, ("a", "float64", "bfloat16")),
    ("mixed gate dtypes", put("b", lambda x: x.float()), TypeError, ("b", "float32", "bfloat16")),
    ("A_log dtype", put("A_log", lambda x: x.bfloat16()), TypeError, ("A_log", "bfloat16", "float32")),
    ("dt_bias dtype", put("dt_bias", lambda x: x.double()), TypeError, ("dt_bias", "float64", "bfloat16")),
    ("slot dtype", put("state_indices", lambda x: x.long()), TypeError, ("cache_indices", "int64", "int32")),
    ("target dtype", put("targets", lambda x: x.long()), TypeError, ("target_indices", "int64", "int32")),
    ("start dtype", put("cu_seqlens", lambda x: x.long()), TypeError, ("query_start_loc", "int64", "int32")),
    ("accepted dtype", put("accepted", lambda x: x.float()), TypeError, ("accepted_lengths", "float32", "int32")),
    ("k not a tensor", put("k", lambda x: x.tolist()), TypeError, ("k", "list", "torch.Tensor")),
    ("a not a tensor", put("a", lambda x: x.tolist()), TypeError, ("a", "list", "torch.Tensor")),
    ("pool not a tensor", put("pool", lambda x: None), TypeError, ("ssm_states", "NoneType", "torch.Tensor")),
    ("slots not a tensor", put("state_indices", lambda x: x.tolist()), TypeError, ("cache_indices", "list")),
    ("target not a tensor", put("targets", lambda x: x.tolist()), TypeError, ("target_indices", "list")),
    ("accepted not a tensor", put("accepted", lambda x: x.tolist()), TypeError, ("accepted_lengths", "list")),
    ("k tokens", put("k", lambda x: x[:-1]), ValueError, ("v", "(24, 4, 128)", "23")),
    ("v tokens", put("v", lambda x: x[:-1]), ValueError, ("v", "(23, 4, 128)", "24")),
    ("HV not a multiple", put("v", lambda x: x[:, :3]), ValueError, ("3 heads", "2", "multiple")),
    ("two batch rows", put("k", lambda x: x.view(2, -1, 2, 128)), ValueError, ("k", "leading 1", "pack")),
    ("v rank", put("v", lambda x: x[:, 0]), ValueError, ("v", "(24, 128)", "3 dimensions")),
    ("a shape", put("a", lambda x: x[:, :2]), ValueError, ("a", "(24, 2)", "24, 4")),
    ("b tokens", put("b", lambda x: x[:-1]), ValueError, ("b", "(23, 4)", "24, 4")),
    ("A_log shape", put("A_log", lambda x: x[:3]), ValueError, ("A_log", "(3,)", "4")),
    ("dt_bias shape", put("dt_bias", lambda x: x[:3]), ValueError, ("dt_bias", "(3,)", "4")),
    ("pool heads", put("pool", lambda x: x[:, :2]), ValueError, ("ssm_states", "(6, 2, 128, 128)", "4, 128, 128")),
    ("pool columns", put("pool", lambda x: x[..., :64]), ValueError, ("ssm_states", "(6, 4, 128, 64)", "128, 128")),
    ("pool rank", put("pool", lambda x: x[0]), ValueError, ("ssm_states", "(4, 128, 128)", "any, 4, 128, 128")),
    ("slots rank", put("state_indices", lambda x: x[None]), ValueError, ("cache_indices", "(1, 2)")),
    ("start length", put("cu_seqlens", lambda x: x[:-1]), ValueError, ("query_start_loc", "(2,)", "3")),
    ("accepted length", put("accepted", lambda x: x[:1]), ValueError, ("accepted_lengths", "(1,)", "2")),
    ("too many accepted", put("accepted", lambda x: x.repeat(2)), ValueError, ("accepted_lengths", "(4,)", "2")),
    ("accepted rank", put("accepted", lambda x: x[:, None]), ValueError, ("accepted_lengths", "(2, 1)")),
    ("target length", put("targets", lambda x: x[:1]), ValueError, ("target_indices", "(1,)", "2")),
    ("strided slots", put("state_indices", lambda x: x.repeat(2)[::2]), ValueError, ("cache_indices", "contiguous")),
    ("strided targets", put("targets", lambda x: x.repeat(2)[::2]), ValueError, ("target_indices", "contiguous")),
    ("strided accepted", put("accepted", lambda x: x.repeat(2)[::2]), ValueError, ("accepted_lengths", "contiguous")),
    # limits of the SM90 program
    ("k address", put("k", misaligned), ValueError, ("k", "mod 16", "clone()")),
    ("k token pitch", put("k", odd_pitch), ValueError, ("k", "multiples of 8", "contiguous()")),
    ("v token pitch", put("v", odd_pitch), ValueError, ("v", "multiples of 8", "contiguous()")),
    ("v not contiguous inside", put("v", transposed), ValueError, ("v", "contiguous")),
    ("pool address", put("pool", misaligned), ValueError, ("ssm_states", "mod 16")),
    ("pool slot pitch", put("pool", odd_pitch), ValueError, ("ssm_states", "multiples of 8")),
    ("pool not contiguous inside", put("pool", transposed), ValueError, ("ssm_states", "contiguous()")),
)  # fmt: skip


def small(device: torch.device | str = "cpu") -> Commit:
    return elsewhere(make((12, 3), 12, slots=6, device=device))


def expect_error(
    case: Commit, edit: Callable[[Case], None], error: type[Exception], words: Words, max_tokens: int = 16
) -> None:
    guarded = dataclasses.replace(case)
    edit(case)
    with pytest.raises(error) as caught:
        run(case, max_tokens)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert untouched(guarded), "a buffer changed"


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "edit", "error", "words"), BAD, ids=[row[0] for row in BAD])
def test_bad_input(
    name: str, edit: Callable[[Case], None], error: type[Exception], words: Words, device: torch.device
) -> None:
    expect_error(small(device), edit, error, words)


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("max_tokens", "words"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_bound_on_tokens(max_tokens: int, words: Words, device: torch.device) -> None:
    expect_error(small(device), lambda case: None, ValueError, words, max_tokens)


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
def test_more_tokens_than_the_program_takes(device: torch.device) -> None:
    """However few of them were accepted."""
    words = ("34 tokens in 2 requests", "max_tokens = 16", "more than 16")
    expect_error(make((1, 1), 17, device=device), lambda case: None, ValueError, words)


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("name", "K", "V"), (("K", 64, 128), ("K", 256, 128), ("V", 128, 96)))
def test_unsupported_state_shape(name: str, K: int, V: int, device: torch.device) -> None:
    value = {"K": K, "V": V}[name]
    case = make((12, 3), 12, K=K, V=V, device=device)
    expect_error(case, lambda case: None, ValueError, (f"{name} is {value}", "CPU tensors"))


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(
    ("cu_seqlens", "max_tokens", "words"),
    (
        ((0, 13, 12), 16, ("never decrease",)),
        ((0, -2, 24), 16, ("never decrease",)),
        ((1, 12, 24), 16, ("start at 0",)),
        ((0, 12, 25), 16, ("at most at 24",)),
        ((0, 10, 24), 12, ("14 tokens", "max_tokens is 12", "max_tokens=14")),
        ((0, 4, 24), 16, ("20 tokens", "max_tokens is 16")),
    ),
)
def test_bad_cu_seqlens_on_the_host(cu_seqlens: tuple[int, ...], max_tokens: int, words: Words) -> None:
    """On a device these values cannot be read without a synchronisation; there they are memory-safe instead."""
    edit = put("cu_seqlens", lambda x: torch.tensor(cu_seqlens, dtype=x.dtype))
    expect_error(small(), edit, ValueError, words, max_tokens)


#: field of the case, argument of the public function
ON_A_DEVICE = (
    ("v", "v"), ("a", "a"), ("b", "b"), ("A_log", "A_log"), ("dt_bias", "dt_bias"), ("pool", "ssm_states"),
    ("state_indices", "cache_indices"), ("targets", "target_indices"), ("cu_seqlens", "query_start_loc"),
    ("accepted", "accepted_lengths"),
)  # fmt: skip


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("nothing_launches")
@pytest.mark.parametrize(("field", "name"), ON_A_DEVICE)
def test_mixed_devices(field: str, name: str, device: torch.device) -> None:
    other = "meta" if device.type == "cpu" else "cpu"
    words = (f"{name} is on {other}", "move it", f"{name}.to(")
    expect_error(small(device), put(field, lambda x: x.to(other)), ValueError, words)


#: query_start_loc of two requests with 24 tokens, as a device might hold it
SENSELESS = (
    (0, 30, 12), (0, -5, 24), (-7, 12, 24), (0, 12, 2**31 - 1), (2**31 - 1, 0, 24), (0, 2**31 - 1, 24), (0, 0, 24),
    (24, 24, 24), (0, 2**31 - 1, -(2**31)),
)  # fmt: skip


@pytest.mark.criterion("5.26")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("moved", (False, True), ids=("in place", "moved"))
@pytest.mark.parametrize("ctas", (None, 3))
@pytest.mark.parametrize("cu_seqlens", SENSELESS, ids=str)
def test_senseless_lengths_are_memory_safe(
    cu_seqlens: Sequence[int], ctas: int | None, moved: bool, device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What the host would refuse, as a device would see it: the values of these states mean nothing."""
    monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
    split(monkeypatch, ctas)
    for accepted in ((12, 12), (2**31 - 1, -(2**31)), (0, 2**31 - 1)):
        case = make(accepted, 12, slots=6, pitched=True, device=device)
        if moved:
            elsewhere(case)
        case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        run(case)
        check_others(case)
        targets = case.state_indices if case.targets is None else case.targets
        changed = case.pool.changed().any(dim=(1, 2, 3)).nonzero().flatten().tolist()
        evidence.equal("slots that changed and are no target", sorted(set(changed) - set(targets.tolist())), [])
