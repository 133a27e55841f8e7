"""Gate 4: gates and norms against fp64, on the emulator or the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gate_engine import Evidence
from tests.launch import watch
from tests.prepass.cases import OUTPUTS, Case, check, make
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.criterion("4.1")
@pytest.mark.parametrize("NT", (1, 7, 8, 9, 31, 100))
def test_numbers_of_tokens(NT: int, device: torch.device, evidence: Evidence) -> None:
    """Around the tile of 8 tokens and the CTA of four warps."""
    case = make(NT, seed=NT, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("4.1")
def test_no_tokens(device: torch.device) -> None:
    case = make(0, device=device)
    case.run()
    assert all(buffer.gaps_intact() for buffer in case.outputs)


@pytest.mark.costly
@pytest.mark.criterion("4.1")
@pytest.mark.parametrize(("H", "HV"), ((2, 2), (1, 3), (3, 6), (1, 8)))
def test_head_groups(H: int, HV: int, device: torch.device, evidence: Evidence) -> None:
    case = make(11, H, HV, device=device)
    case.run()
    check(case, evidence)


@pytest.mark.criterion("4.1")
@pytest.mark.parametrize("allow_neg_eigval", (False, True))
@pytest.mark.parametrize(
    ("gate", "bias"), ((torch.float32, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16,) * 2), ids=str
)
def test_gate_dtypes(
    gate: torch.dtype, bias: torch.dtype, allow_neg_eigval: bool, device: torch.device, evidence: Evidence
) -> None:
    case = make(gate=gate, bias=bias, allow_neg_eigval=allow_neg_eigval, device=device)
    case.run()
    check(case, evidence)


def extreme_gates(device: torch.device | str) -> Case:
    """Every A_log with every x = a + dt_bias: thresholds of softplus, underflow, overflow, no decay, full decay."""
    A_log = torch.tensor([-100.0, -20.0, -3.0, 0.0, 2.0, 10.0, 30.0, 88.0, 89.0, 100.0])
    x = torch.tensor([-1e4, -150, -104, -88, -30, -20, -16.01, -16, -15.99, -5, 0, 1e-30, 3, 20, 20.01, 89, 300, 1e4])
    case = make(len(x), 1, len(A_log), gate=torch.float32, device=device)
    case.A_log.copy_(A_log)
    case.a.copy_(x[:, None].expand(case.a.shape))
    case.b.copy_(x[:, None].expand(case.a.shape) + A_log)
    case.dt_bias.zero_()
    return case


def odd_vectors(device: torch.device | str) -> Case:
    """Zero vectors, whose norm is the epsilon alone; as small as its root; so large that bf16 is coarse; one column."""
    case = make(10, device=device)
    for x in (case.q, case.k):
        x[0] = 0
        x[1] *= 2.0**-13
        x[2] *= 2.0**-60
        x[3] *= 2.0**50
        x[4, :, 1:] = 0
        x[5] = 1
    return case


@pytest.mark.criterion("4.2")
def test_extreme_gates(device: torch.device, evidence: Evidence) -> None:
    case = extreme_gates(device)
    case.run()
    check(case, evidence, " at extreme gates")


@pytest.mark.criterion("4.2")
def test_odd_vectors(device: torch.device, evidence: Evidence) -> None:
    case = odd_vectors(device)
    case.run()
    check(case, evidence, " of odd vectors")


@pytest.mark.criterion("4.3")
def test_strides(device: torch.device, evidence: Evidence) -> None:
    case = make(13, pitched=True, device=device)
    case.a = case.a.T.contiguous().T  # heads apart, tokens together
    case.b = case.b[:, :1].expand(case.b.shape)  # one value for all heads
    assert case.a.stride() == (1, 13) and case.b.stride(1) == 0 and not case.q.is_contiguous()
    case.run()
    check(case, evidence)


@pytest.mark.criterion("4.3")
def test_open_strides_of_single_elements(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves the stride of a dimension of size 1 open; a launch gets canonical ones, without a copy."""
    case = make(1, 1, 1, device=device)
    case.q, case.k = (x.as_strided(x.shape, (3, 5, 1)) for x in (case.q, case.k))
    case.A_log, case.dt_bias = (x.as_strided((1,), (9,)) for x in (case.A_log, case.dt_bias))
    for buffer in case.outputs:
        buffer.view = buffer.view.as_strided((1, 1), (7, 7))
    launches = watch(monkeypatch)
    case.run()
    launched = [x for _, args in launches for x in args if isinstance(x, torch.Tensor)]
    check(case, evidence)
    assert all(x.stride() == torch.empty(x.shape).stride() for x in launched[4:])
    assert launched[0].stride(0) % 8 == 0 and launched[0].data_ptr() == case.q.data_ptr()


@pytest.mark.criterion("4.5")
@pytest.mark.parametrize("name", ("q", "k", "a", "b"))
def test_nan_stays_in_its_token(name: str, device: torch.device, evidence: Evidence) -> None:
    clean, dirty = make(13, device=device), make(13, device=device)
    getattr(dirty, name)[6] = torch.nan
    clean.run()
    dirty.run()
    rest = [t for t in range(13) if t != 6]
    for output, x, y in zip(OUTPUTS, clean.outputs, dirty.outputs, strict=True):
        evidence.equal(f"{output}: changed by a NaN in another token", different(x.view[rest], y.view[rest]), 0)


@pytest.mark.criterion("4.5")
def test_a_token_does_not_depend_on_its_place(device: torch.device, evidence: Evidence) -> None:
    """The same tokens in another order, so in other rows of other tiles: the same bits."""
    case, other = make(21, device=device), make(21, device=device)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).to(device)
    for name in ("q", "k", "a", "b"):
        getattr(other, name).copy_(getattr(case, name)[order])
    case.run()
    other.run()
    for output, x, y in zip(OUTPUTS, case.outputs, other.outputs, strict=True):
        evidence.equal(f"{output}: changed by its place", different(x.view[order], y.view), 0)


@pytest.mark.criterion("4.5")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = watch(monkeypatch)
    for NT, pitched in ((1, False), (40, True), (17, False)):
        make(NT, pitched=pitched, device=device).run()
    assert len(launched) == 3
    evidence.equal("programs for three sizes", len({program.label for program, _ in launched}), 1)
