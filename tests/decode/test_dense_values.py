"""Gate 2, dense recurrent decode: outputs and states against fp64, on the emulator or the GPU.

Every program takes seconds to build without a GPU, so the cases share few static configurations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode import dense
from tests.decode.dense_cases import DenseCase, check, check_values, make
from tests.gate_engine import Evidence
from tests.launch import watch
from tests.verify.cases import relative_l2

pytestmark = pytest.mark.usefixtures("emulator")

#: static configurations: heads, dims, layout, norm, states that exist
PLAIN: dict[str, Any] = {}
GROUPED: dict[str, Any] = {"H": 1, "HV": 3, "V": 64, "use_qk_l2norm_in_kernel": False}
V_FIRST: dict[str, Any] = {"H": 1, "HV": 2, "V": 256, "state_v_first": True}
SMALL: dict[str, Any] = {"H": 1, "HV": 4, "V": 64}


def run(case: DenseCase, evidence: Evidence) -> DenseCase:
    case.run()
    check(case, evidence)
    return case


@pytest.mark.criterion("2.20")
@pytest.mark.parametrize(("B", "T"), ((1, 1), (3, 1), (1, 2), (2, 7), (1, 40)))
def test_batch_and_tokens(B: int, T: int, device: torch.device, evidence: Evidence) -> None:
    run(make(B, T, **PLAIN, seed=B + T, device=device), evidence)


@pytest.mark.criterion("2.20", "2.21")
@pytest.mark.parametrize("seed", range(4))
def test_random_ragged_shapes(seed: int, device: torch.device, evidence: Evidence) -> None:
    """Packed requests of random lengths, a third of them empty, in [V, K] states with V != K."""
    rng = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(0, 15, (int(torch.randint(2, 6, (), generator=rng)),), generator=rng) - 4).clamp(min=0)
    tail = int(torch.randint(0, 4, (), generator=rng))
    pitched = bool(seed % 2)
    run(make(**V_FIRST, packed=lengths.tolist(), tail=tail, pitched=pitched, seed=seed, device=device), evidence)


@pytest.mark.criterion("2.20")
def test_fp16(device: torch.device, evidence: Evidence) -> None:
    run(make(2, 5, **SMALL, dtype=torch.float16, device=device), evidence)


@pytest.mark.criterion("2.21", "2.22")
@pytest.mark.parametrize("seqlens", ((1, 5, 3), (0, 5, 0), (9, 2**31 - 1, -3), (5, 5, 5)), ids=str)
def test_lengths_of_batch_rows(seqlens: tuple[int, ...], device: torch.device, evidence: Evidence) -> None:
    """What lies beyond a length is NaN, and matters to nothing; three value heads of one key head."""
    case = make(3, 5, **GROUPED, seqlens=seqlens, seed=7, device=device)
    for row, tokens in case.requests:
        for x in (case.q, case.k, case.v, case.g, case.beta):
            x[row, tokens.stop :] = torch.nan
    run(case, evidence)


@pytest.mark.criterion("2.22", "2.23")
@pytest.mark.parametrize("packed", ((4, 0, 7, 1), (0, 0), (0, 12), (1, 1, 1)), ids=str)
def test_packed_requests(packed: tuple[int, ...], device: torch.device, evidence: Evidence) -> None:
    """int64 starts, as FLA's callers have them, and no initial state; tokens of no request are NaN."""
    case = make(**SMALL, packed=packed, tail=3, index=torch.int64, initial=False, device=device)
    for x in (case.q, case.k, case.v, case.g, case.beta):
        x[:, sum(packed) :] = torch.nan
    run(case, evidence)


@pytest.mark.criterion("2.23")
@pytest.mark.parametrize("scale", (0.0, 1.0, -0.3))
def test_scale(scale: float, device: torch.device, evidence: Evidence) -> None:
    run(make(2, 4, **PLAIN, scale=scale, device=device), evidence)
    run(make(2, 5, **GROUPED, seqlens=(5, 3), scale=scale, device=device), evidence)


@pytest.mark.criterion("2.23")
def test_faint_keys_are_normalised(device: torch.device, evidence: Evidence) -> None:
    """Norms near sqrt(1e-6), where it matters that this lies inside the root."""
    case = make(2, 4, **PLAIN, device=device)
    case.q.mul_(2.0**-13)
    case.k.mul_(2.0**-13)
    run(case, evidence)


@pytest.mark.criterion("2.23")
@pytest.mark.parametrize("extreme", (-200.0, -torch.inf, 0.0))
def test_decay_of_everything_and_of_nothing(extreme: float, device: torch.device, evidence: Evidence) -> None:
    case = make(2, 4, **PLAIN, device=device)
    case.g[:, 1] = extreme
    run(case, evidence)


@pytest.mark.criterion("2.23")
def test_neither_initial_nor_final_state(device: torch.device, evidence: Evidence) -> None:
    run(make(3, 6, **SMALL, initial=False, final=False, state_v_first=True, device=device), evidence)


@pytest.mark.criterion("2.24")
@pytest.mark.parametrize("options", ({}, {"seed": 3, "B": 1}), ids=str)
def test_pitches(options: dict[str, Any], device: torch.device, evidence: Evidence) -> None:
    case = make(**{"B": 2, "T": 5, **PLAIN, **options}, pitched=True, device=device)
    strided = [case.q, case.v, case.g, case.o.view]
    strided += [x.view for x in (case.initial, case.final) if x is not None and len(x.view) > 1]
    assert not any(x.is_contiguous() for x in strided)
    run(case, evidence)


@pytest.mark.criterion("2.24")
def test_head_first(device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views all the way to the launch, and the same bits as tokens first."""
    case = make(2, 5, **PLAIN, device=device)
    names = ("q", "k", "v", "g", "beta")
    first = {name: getattr(case, name).transpose(1, 2).contiguous() for name in names}
    assert case.initial is not None
    launched = watch(monkeypatch)
    o, final = dense.recurrent_gated_delta_rule(
        **first, initial_state=case.initial.view, head_first=True, **case.options
    )
    assert o.shape == (2, 4, 5, 128) and o.is_contiguous()
    check_values(case, o.transpose(1, 2), final, evidence)
    ((_, args),) = launched
    assert [x.data_ptr() for x in args[:5]] == [x.data_ptr() for x in first.values()], "an input was copied"
    assert args[5].data_ptr() == o.data_ptr()
    case.run()
    assert torch.equal(case.o.view, o.transpose(1, 2))


@pytest.mark.criterion("2.24")
def test_open_strides_of_single_elements(device: torch.device, evidence: Evidence) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones."""
    case = make(1, 1, **PLAIN, device=device)
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        setattr(case, name, x.as_strided(x.shape, (3, 5, *x.stride()[2:])))
    case.o.view = case.o.view.as_strided(case.o.view.shape, (7, 9, *case.o.view.stride()[2:]))
    assert case.initial is not None
    view = case.initial.view
    case.initial.view = view.as_strided(view.shape, (3, *view.stride()[1:]))
    run(case, evidence)


@pytest.mark.criterion("2.24")
@pytest.mark.parametrize(
    "options",
    ({"B": 2, "T": 5, **PLAIN}, {**SMALL, "packed": (4, 0, 3), "tail": 3, "index": torch.int64, "initial": False}),
    ids=("batch", "packed"),
)
def test_results_are_written_whole(
    options: dict[str, Any], device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the memory that torch.empty returns remains, and the final state is not the initial one."""
    case = make(**options, device=device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    o, final = case.run_public()
    monkeypatch.undo()
    assert final is not None and o.dtype == case.v.dtype and final.dtype == torch.float32
    check_values(case, o, final, evidence)
    if case.initial is not None:
        assert final.data_ptr() != case.initial.view.data_ptr() and not case.initial.differs().any()


@pytest.mark.criterion("2.25")
def test_final_state_may_be_the_initial_one(device: torch.device) -> None:
    apart, in_place = (make(2, 5, **PLAIN, pitched=True, device=device) for _ in range(2))
    apart.run()
    in_place.final = in_place.initial
    in_place.run()
    assert in_place.final is not None and apart.final is not None
    assert torch.equal(in_place.o.view, apart.o.view) and torch.equal(in_place.final.view, apart.final.view)
    assert in_place.final.gaps_intact()


@pytest.mark.criterion("2.25")
def test_one_token_at_a_time(device: torch.device, evidence: Evidence) -> None:
    """T calls of one token equal one call of T tokens: nothing is rounded between them."""
    case = make(2, 9, **PLAIN, device=device)
    case.run()
    assert case.initial is not None and case.final is not None
    state: Tensor | None = case.initial.view
    outputs = []
    for t in range(9):
        q, k, v, g, beta = (x[:, t : t + 1] for x in (case.q, case.k, case.v, case.g, case.beta))
        o, state = dense.recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=state, **case.options)
        outputs.append(o)
    assert state is not None
    error = relative_l2(state, case.final.view.double())
    evidence.at_most("states of T calls against one call, relative L2", error, 1e-6)
    differing = int((torch.cat(outputs, 1) != case.o.view).sum())
    evidence.note("bf16 outputs of T calls that differ from one call", differing)
    evidence.at_most(
        "o of T calls against one call, relative L2",
        relative_l2(torch.cat(outputs, 1), case.o.view.double()),
        5e-4,  # a changed rounding here and there
    )


@pytest.mark.criterion("2.25")
@pytest.mark.parametrize("head_batch", (2, 4))
def test_heads_that_share_a_cta_change_no_bit(head_batch: int, device: torch.device) -> None:
    options: dict[str, Any] = {**SMALL, "B": 2, "T": 5, "dtype": torch.float16, "pitched": True, "device": device}
    alone, shared = make(**options), make(**options, head_batch=head_batch)
    alone.run()
    shared.run()
    assert alone.final is not None and shared.final is not None
    assert torch.equal(alone.o.view, shared.o.view) and torch.equal(alone.final.view, shared.final.view)
    assert shared.o.gaps_intact() and shared.final.gaps_intact()


@pytest.mark.criterion("2.22")
@pytest.mark.parametrize("initial", (True, False))
@pytest.mark.parametrize(
    "shape",
    (
        {"B": 2, "T": 0},
        {"B": 0, "T": 3},
        {"packed": (0, 0)},
        {"packed": (), "tail": 3},
        {"B": 2, "T": 0, "seqlens": (3, 0)},
    ),
    ids=str,
)
def test_no_tokens_and_no_requests(
    shape: dict[str, Any], initial: bool, device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(**shape, initial=initial, device=device)
    launched = watch(monkeypatch)
    run(case, evidence)
    o, final = case.run_public()
    assert not launched and o.shape == case.v.shape and not o.any()
    assert final is not None and case.final is not None and torch.equal(final, case.final.view)
