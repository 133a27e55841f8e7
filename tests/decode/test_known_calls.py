"""Gate 2, paged decode: a call whose like has passed the full checks skips them and computes the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.decode import api, contract
from tests.decode.cases import check, make, most_requests_of_the_small_tile
from tests.gate_engine import Evidence
from tests.launch import watch
from tests.verify.one_token import different

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The full checks that follow; no call is known yet."""
    made: list[str] = []
    real = contract.check_vectors

    def count(*args: Any) -> None:
        made.append("full check")
        real(*args)

    monkeypatch.setattr(contract, "check_vectors", count)
    monkeypatch.setattr(api, "_programs", {})
    return made


KINDS: tuple[dict[str, Any], ...] = (
    {"N": 3},
    {"N": most_requests_of_the_small_tile() + 1, "pitched": True},
    {"N": 3, "moves": True},
)


@pytest.mark.criterion("2.14")
@pytest.mark.parametrize("packed", (False, True), ids=("separate", "packed"))
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_known_call_skips_the_checks_and_has_the_same_bits(
    options: dict[str, Any], packed: bool, device: torch.device, evidence: Evidence, checked: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launched = watch(monkeypatch)
    cases = [make(device=device, **options) for _ in range(3)]
    for case in cases:
        if packed:
            case.run_packed()
        else:
            case.run()
    evidence.equal("full checks in three calls of a kind", len(checked), 1)
    evidence.equal("launches in three calls", len(launched), 3)
    evidence.equal("programs in three calls", len({program.label for program, _ in launched}), 1)
    for case in cases[1:]:
        for name in ("o", "pool"):
            count = different(getattr(case, name).storage, getattr(cases[0], name).storage)
            evidence.equal(f"{name}: elements by which a known call differs from the first one", count, 0)
    check(cases[2], evidence)


@pytest.mark.criterion("2.14")
def test_what_may_change_in_a_known_call(device: torch.device, evidence: Evidence, checked: list[str]) -> None:
    """Contents, addresses, pitches, scale and the range of beta are arguments of the launch."""
    make(3, device=device).run()
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 1}, {"pitched": True}, {"scale": 0.0}, {"scale": 0.7}, {"allow_neg_eigval": True}
    )  # fmt: skip
    for options in changes:
        case = make(3, device=device, **options)
        case.run()
        check(case, evidence)
    evidence.equal("full checks in six calls", len(checked), 1)


@pytest.mark.criterion("2.14")
def test_calls_of_another_kind_are_checked(device: torch.device, evidence: Evidence, checked: list[str]) -> None:
    """What picks another program is never taken for known, whatever was called before; each kind is right, twice."""
    kinds: tuple[dict[str, Any], ...] = (
        {"N": 3},
        {"N": 3, "moves": True},
        {"N": 3, "pool": torch.float32},
        {"N": 3, "pool": torch.float16},
        {"N": 3, "H": 2, "HV": 2, "V": 64},
    )
    for _ in range(2):
        for options in kinds:
            case = make(device=device, **options)
            case.run()
            check(case, evidence)
    evidence.equal("full checks of five kinds in ten calls", len(checked), len(kinds))


@pytest.mark.criterion("2.14")
def test_other_numbers_of_requests_and_slots(device: torch.device, evidence: Evidence, checked: list[str]) -> None:
    """Known or not: right."""
    for N, slots in ((3, 5), (5, 5), (2, 40), (most_requests_of_the_small_tile() + 1, 90), (3, 5)):
        case = make(N, slots=slots, device=device)
        case.run()
        check(case, evidence)
    assert len(checked) < 5
