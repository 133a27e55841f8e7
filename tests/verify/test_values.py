"""Gate 3: outputs, snapshots and commits against fp64, on the emulator or the GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.verify import contract
from tests.gate_engine import Evidence
from tests.launch import watch
from tests.verify.cases import check, check_memory, make

pytestmark = pytest.mark.usefixtures("emulator")

POOLS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.criterion("3.1", "3.2", "3.3")
@pytest.mark.parametrize("T", range(1, 17))
def test_every_block_length(T: int, device: torch.device, evidence: Evidence) -> None:
    case = make(N=2, T=T, seed=T, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.1", "3.2", "3.3")
@pytest.mark.parametrize("T", (1, 7, 12, 16))
@pytest.mark.parametrize("pool", POOLS[1:], ids=str)
def test_pool_dtypes(pool: torch.dtype, T: int, device: torch.device, evidence: Evidence) -> None:
    case = make(N=2, T=T, pool=pool, seed=T, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.5", "3.6")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("lengths", ((17,), (40, 0, 3, 16), (33, 32)), ids=str)
def test_beyond_one_block(
    pool: torch.dtype, lengths: tuple[int, ...], device: torch.device, evidence: Evidence
) -> None:
    case = make(T=lengths, H=1, HV=2, pool=pool, seed=sum(lengths), device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.4", "3.6")
@pytest.mark.parametrize("lengths", ((12, 16), (5, 0, 1), (33, 0, 16)), ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_commit(pool: torch.dtype, lengths: tuple[int, ...], device: torch.device, evidence: Evidence) -> None:
    case = make(T=lengths, H=1, HV=2, pool=pool, disable_state_update=False, device=device)
    case.run()
    check(case, evidence)
    for n, length in enumerate(lengths):
        if length:
            last = case.states.view[case.rows[n], length - 1]
            assert torch.equal(case.pool.view[case.state_indices[n]], last), "the slot is not the last snapshot"


@pytest.mark.criterion("3.6")
@pytest.mark.parametrize("lengths", ((1, 2, 3, 16), (0, 0), (0, 12, 0), (16, 0, 1)), ids=str)
def test_ragged(lengths: tuple[int, ...], device: torch.device, evidence: Evidence) -> None:
    case = make(T=lengths, tail=5, steps=16, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.6")
def test_no_requests_and_no_tokens(device: torch.device) -> None:
    for case in (make(T=(), tail=3, steps=4, device=device), make(T=(0,), steps=4, device=device)):
        case.run()
        assert not case.o.view.any()
        assert not case.states.changed().any()


@pytest.mark.criterion("3.7")
@pytest.mark.parametrize("commit", (False, True))
def test_padding_is_inert(commit: bool, device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 12, 12, 12), tail=2, steps=13, disable_state_update=not commit, device=device)
    case.state_indices[1], case.state_indices[3] = -1, -1
    for x in (case.q, case.k, case.v, case.a, case.b):
        x[12:24], x[36:] = torch.nan, torch.nan
    case.run()
    check(case, evidence)
    assert not case.o.view[12:24].any()


@pytest.mark.criterion("3.7")
@pytest.mark.parametrize("commit", (False, True))
def test_indices_beyond_a_buffer_are_padding(commit: bool, device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 12, 12), disable_state_update=not commit, device=device)
    wild = make(T=(12, 12, 12), disable_state_update=not commit, device=device)
    wild.state_indices[0], wild.state_indices[2] = len(case.pool.view), 2**31 - 1
    wild.rows[1] = len(case.states.view) + 5
    case.state_indices[0], case.state_indices[2], case.rows[1] = -1, -1, -1
    wild.run()
    check(wild, evidence, case.expected())


@pytest.mark.criterion("3.27")
@pytest.mark.parametrize("commit", (False, True))
@pytest.mark.parametrize(
    "cu_seqlens", ((0, 30, 12), (0, -5, 24), (-7, 12, 24), (0, 12, 2**31 - 1), (2**31 - 1, 0, 24), (0, 0, 24)), ids=str
)
def test_senseless_lengths_are_memory_safe(
    cu_seqlens: tuple[int, ...], commit: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host would refuse, as a device would see it: the values of these outputs mean nothing."""
    monkeypatch.setattr(contract, "_check_cu_seqlens", lambda *_: None)
    case = make(T=(12, 12), disable_state_update=not commit, pitched=True, device=device)
    case.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    case.run()
    check_memory(case)


@pytest.mark.criterion("3.8")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_pitches(pool: torch.dtype, device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 7), pool=pool, steps=14, pitched=True, tail=1, device=device)
    assert not case.a.is_contiguous() and not case.o.view.is_contiguous() and not case.pool.view.is_contiguous()
    pointers = [x.data_ptr() for x in (case.q, case.k, case.v)]
    case.run()
    check(case, evidence)
    assert pointers == [x.data_ptr() for x in (case.q, case.k, case.v)]


@pytest.mark.criterion("3.8")
def test_open_strides_of_single_elements(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones, without a copy."""
    case = make(N=1, T=1, H=1, HV=1, device=device)
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        setattr(case, name, x.as_strided(x.shape, (3, 5, 1)))
    for buffer in (case.pool, case.o, case.states):
        shape = buffer.view.shape
        odd = [7 if size == 1 else stride for size, stride in zip(shape, buffer.view.stride(), strict=True)]
        buffer.view = buffer.view.as_strided(shape, odd)
    for name in ("state_indices", "A_log", "dt_bias"):
        setattr(case, name, getattr(case, name).as_strided((1,), (9,)))
    case.rows = case.rows[:1].as_strided((1,), (9,))
    launches = watch(monkeypatch)
    case.run()
    launched = [x for _, args in launches for x in args if isinstance(x, torch.Tensor)]
    check(case, evidence)
    for x in launched:
        outer = {2: 2, 5: 2, 1: 0}.get(x.dim(), 1)
        assert x.stride()[outer:] == torch.empty(x.shape).stride()[outer:]
        assert x.dim() == 2 or not any(stride % 8 for stride in x.stride()[:outer]), "the launch promises this"
    assert launched[0].data_ptr() == case.q.data_ptr()


@pytest.mark.costly
@pytest.mark.criterion("3.9")
@pytest.mark.parametrize(("H", "HV"), ((2, 2), (2, 4), (1, 3), (2, 8), (1, 8)))
def test_head_groups(H: int, HV: int, device: torch.device, evidence: Evidence) -> None:
    case = make(N=1, T=5, H=H, HV=HV, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.9")
@pytest.mark.parametrize("V", (64, 256))
def test_value_dim_is_not_key_dim(V: int, device: torch.device, evidence: Evidence) -> None:
    case = make(T=(5, 16), H=1, HV=2, V=V, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.12")
def test_snapshot_rows_and_steps(device: torch.device, evidence: Evidence) -> None:
    case = make(T=(3, 12, 1), steps=16, device=device)
    case.rows = torch.tensor([3, -1, 0, 2, 1, 7], dtype=torch.int32, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.13")
def test_requests_sharing_a_slot(device: torch.device, evidence: Evidence) -> None:
    case = make(T=(12, 4, 9), device=device)
    case.state_indices[:] = 0
    case.run()
    check(case, evidence)


@pytest.mark.criterion("3.15")
@pytest.mark.parametrize("lengths", ((12, 12), (20, 12)), ids=str)
def test_nan_stays_where_it_is(lengths: tuple[int, ...], device: torch.device) -> None:
    """A NaN in token 6 of request 0: its earlier tokens and request 1 are bit-equal to a clean run."""
    for name in ("q", "k", "v", "a", "b"):
        clean, dirty = (make(T=lengths, H=1, HV=2, device=device) for _ in range(2))
        getattr(dirty, name)[6] = torch.nan
        clean.run()
        dirty.run()
        kept = torch.ones(sum(lengths), dtype=torch.bool)
        kept[6 : lengths[0]] = False
        assert torch.equal(clean.o.view[kept], dirty.o.view[kept]), f"NaN in {name} reached another output"
        row0, row1 = clean.rows[0], clean.rows[1]
        assert torch.equal(clean.states.view[row0, :6], dirty.states.view[row0, :6]), f"NaN in {name} went back"
        assert torch.equal(clean.states.view[row1, :12], dirty.states.view[row1, :12]), f"NaN in {name} crossed over"


@pytest.mark.criterion("3.16")
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_determinism(pool: torch.dtype, device: torch.device) -> None:
    first, second = (make(T=(12, 16), pool=pool, seed=3, device=device) for _ in range(2))
    first.run()
    second.run()
    assert torch.equal(first.o.view, second.o.view)
    assert not (first.states.storage.view(torch.uint8) != second.states.storage.view(torch.uint8)).any()


@pytest.mark.criterion("3.17")
@pytest.mark.parametrize("short", (True, False), ids=("up to 16 steps", "more"))
def test_sizes_and_pitches_do_not_compile(
    short: bool, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs that calls of many sizes launch are one program."""
    launched = watch(monkeypatch)
    for N, T, slots, steps, pitched in (
        ((1, 1, 3, 3, False), (5, 12, 9, 16, True), (2, 16, 40, 16, False))
        if short
        else (
            (1, 12, 3, 20, False),
            (3, 20, 9, 24, True),
            (2, 7, 40, 40, False),
        )
    ):
        case = make(N=N, T=T, slots=slots, steps=steps, pitched=pitched, device=device)
        case.run()
        check(case, evidence)
    assert len(launched) == 3
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 1)
