"""Gate 5: outputs against fp64 and a pool that is only read, on the emulator or the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.gate_engine import Evidence
from tests.launch import watch
from tests.replay.cases import Buffer, Case, check, make, run, split
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)
#: most CTAs of a program: those of the plan, which give few requests the smaller tile; fewer than there is work
SPLITS = (None, 3)


@pytest.mark.criterion("5.1", "5.2")
@pytest.mark.parametrize("T", range(1, 17))
@pytest.mark.parametrize("ctas", SPLITS)
def test_every_number_of_tokens(
    ctas: int | None, T: int, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make(N=2, T=T, seed=T, device=device)
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.1", "5.2")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS[1:], ids=str)
def test_pool_dtypes(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    for lengths in ((1, 4, 5), (8, 9, 16)):
        case = make(T=lengths, pool=pool, seed=sum(lengths), device=device)
        run(case)
        check(case, evidence)


@pytest.mark.criterion("5.1")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("of", ("state", "values"))
def test_either_term_alone(
    of: str, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """o is a sum of what the state gives and what the values give: neither hides behind the other."""
    split(monkeypatch, ctas)
    case = make(T=(12, 5, 16, 1), device=device)
    (case.v if of == "state" else case.pool.view).zero_()
    case.pool.before = case.pool.storage.clone()
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.3")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("lengths", ((1, 2, 3, 16), (0, 0), (0, 12, 0), (16, 0, 1), (9, 8, 0, 7, 13, 0)), ids=str)
def test_ragged(
    lengths: tuple[int, ...],
    ctas: int | None,
    device: torch.device,
    evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split(monkeypatch, ctas)
    case = make(T=lengths, tail=5, device=device)
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.3")
@pytest.mark.parametrize("lengths", ((), (0,), (0, 0, 0)), ids=str)
@pytest.mark.parametrize("tail", (0, 3))
def test_no_requests_and_no_tokens(lengths: tuple[int, ...], tail: int, device: torch.device) -> None:
    case = make(T=lengths, tail=tail, device=device)
    run(case)
    assert not case.o.view.any() and case.o.gaps_intact()


@pytest.mark.criterion("5.4")
def test_a_pool_without_slots_is_all_padding(device: torch.device) -> None:
    case = make(T=(12, 1), tail=2, device=device)
    case.pool.view = case.pool.view[:0]
    run(case)
    assert not case.o.view.any() and case.o.gaps_intact() and not case.pool.differs().any()


@pytest.mark.criterion("5.4")
@pytest.mark.parametrize("ctas", SPLITS)
def test_padding_is_zero(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-1 and indices beyond the pool; NaN in their tokens, in the tokens of no request, and in every unused slot."""
    split(monkeypatch, ctas)
    case = make(T=(12, 7, 3, 16), slots=7, tail=2, device=device)
    case.state_indices[:] = torch.tensor([4, -1, 7, 2**31 - 1])
    for x in (case.q, case.k, case.v, case.a, case.b):
        x[12:] = torch.nan
    unused = [0, 1, 2, 3, 5, 6]
    case.pool.view[unused] = torch.nan
    case.pool.before = case.pool.storage.clone()
    run(case)
    check(case, evidence)
    assert not case.o.view[12:].any()


@pytest.mark.criterion("5.5")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pitches(
    pool: torch.dtype, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make(T=(12, 7), pool=pool, pitched=True, tail=1, device=device)
    assert not case.a.is_contiguous() and not case.o.view.is_contiguous() and not case.pool.view.is_contiguous()
    launched = watch(monkeypatch)
    run(case)
    check(case, evidence)
    ((_, args),) = launched
    for name, x in (("q", args[0]), ("k", args[1]), ("v", args[2]), ("a", args[3]), ("b", args[4])):
        assert x.data_ptr() == getattr(case, name).data_ptr(), f"{name} was copied"


@pytest.mark.criterion("5.5")
def test_open_strides_of_single_elements(device: torch.device, evidence: Evidence) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones."""
    case = make(N=1, T=1, H=1, HV=1, device=device)
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        setattr(case, name, x.as_strided(x.shape, (3, 5, 1)))
    for buffer in (case.pool, case.o):
        shape = buffer.view.shape
        odd = [7 if size == 1 else stride for size, stride in zip(shape, buffer.view.stride(), strict=True)]
        buffer.view = buffer.view.as_strided(shape, odd)
    for name in ("state_indices", "A_log", "dt_bias"):
        setattr(case, name, getattr(case, name).as_strided((1,), (9,)))
    run(case)
    check(case, evidence)


@pytest.mark.costly
@pytest.mark.criterion("5.6")
@pytest.mark.parametrize(("H", "HV"), ((2, 2), (1, 3), (2, 8), (1, 8)))
def test_head_groups(H: int, HV: int, device: torch.device, evidence: Evidence) -> None:
    case = make(T=(5, 13), H=H, HV=HV, device=device)
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.6")
@pytest.mark.parametrize("ctas", SPLITS)
@pytest.mark.parametrize("V", (64, 256))
def test_value_dim_is_not_key_dim(
    V: int, ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(monkeypatch, ctas)
    case = make(T=(5, 16), H=1, HV=2, V=V, device=device)
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.4")
def test_requests_sharing_a_slot(device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 4, 9), device=device)
    case.state_indices[:] = 3
    run(case)
    check(case, evidence)


@pytest.mark.criterion("5.8")
def test_nan_stays_in_its_request(device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in a token of request 1, in one CTA after the others: requests 0 and 2 are bit-equal to a clean run."""
    split(monkeypatch, 3)
    clean = make(T=(12, 12, 5), device=device)
    run(clean)
    kept = [*range(12), *range(24, 29)]
    for name in ("q", "k", "v", "a", "b"):
        dirty = make(T=(12, 12, 5), device=device)
        getattr(dirty, name)[18] = torch.nan
        run(dirty)
        evidence.equal("outputs changed by a NaN", different(dirty.o.view[kept], clean.o.view[kept]), 0)
        assert dirty.o.view[18].isnan().any(), f"a NaN in {name} has no effect"


@pytest.mark.criterion("5.9")
@pytest.mark.parametrize("pool", POOLS[::2], ids=str)
def test_bits_do_not_depend_on_the_split(
    pool: torch.dtype, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large tiles, one piece of work a CTA and many: two runs and all splits have the same bits."""
    found = []
    for ctas in (None, None, 64, 3):
        with monkeypatch.context() as patch:
            split(patch, ctas)
            case = make(T=(12, 1, 16, 0, 7), pool=pool, tail=1, device=device)
            run(case)
            found.append(case.o.view)
    for other in found[1:]:
        evidence.equal("outputs that differ between splits", different(other, found[0]), 0)


def alone(case: Case, n: int) -> Case:
    """Request n of `case` as a call of its own."""
    tokens = slice(int(case.cu_seqlens[n]), int(case.cu_seqlens[n + 1]))
    single = make(T=(tokens.stop - tokens.start,), device=case.q.device)
    single.pool, single.A_log, single.dt_bias = case.pool, case.A_log, case.dt_bias
    single.state_indices = case.state_indices[n : n + 1].clone()
    for name in ("q", "k", "v", "a", "b"):
        setattr(single, name, getattr(case, name)[tokens])
    return single


@pytest.mark.criterion("5.9")
@pytest.mark.parametrize("ctas", SPLITS)
def test_a_request_alone_and_in_a_batch(
    ctas: int | None, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(T=(3, 12, 16, 8), device=device)
    with monkeypatch.context() as patch:
        split(patch, ctas)
        run(batch)
    for n, length in enumerate(batch.lengths):
        single = alone(batch, n)
        run(single, max_tokens=length)
        start = int(batch.cu_seqlens[n])
        evidence.equal(
            "outputs that differ in a batch", different(single.o.view, batch.o.view[start : start + length]), 0
        )


@pytest.mark.criterion("5.10")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = watch(monkeypatch)
    sizes: Sequence[tuple[dict[str, Any], int]] = (
        ({"N": 1, "T": 1, "slots": 1}, 1),
        ({"N": 5, "T": 12, "slots": 9, "pitched": True}, 16),
        ({"N": 40, "T": 2}, 2),
    )
    for options, max_tokens in sizes:
        case = make(device=device, **options)
        run(case, max_tokens)
        check(case, evidence)
    assert len(launched) == 3
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 1)


@pytest.mark.criterion("5.5")
def test_o_is_returned_and_written_whole(device: torch.device) -> None:
    case = make(T=(12, 5), tail=2, device=device)
    case.o = Buffer.make(torch.full_like(case.o.view, torch.inf))
    assert run(case) is case.o.view
    assert torch.isfinite(case.o.view).all()
