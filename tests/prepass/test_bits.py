"""Gate 4: verify behind a prepass leaves the bits that verify alone leaves, on the emulator or the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gate_engine import Evidence
from tests.verify.cases import Case, check, make, padded
from tests.verify.one_token import different

BUFFERS = ("o", "states", "pool")


def plain(case: Case) -> Case:
    return case


def tame(case: Case) -> Case:
    """Without the norm |k|^2 is about K and the recurrence explodes: bring k near unit length."""
    case.k.mul_(1 / 16)
    return case


def extreme(case: Case) -> Case:
    """Strong and weak decay in one block, gates that saturate, vectors without length."""
    case.A_log[0], case.A_log[1] = -100.0, 100.0
    case.dt_bias[0], case.dt_bias[1] = 3.0, 0.0
    case.a[:, 0] = torch.linspace(-10, 100, len(case.a)).to(case.a)
    case.a[::2, 1] = -150.0
    case.b[::3] = 100.0
    case.q[3], case.k[5] = 0, 0
    case.k[7] *= 2.0**-13
    return case


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: (options of the case, change of its inputs)
CASES: tuple[tuple[dict[str, Any], Callable[[Case], Case]], ...] = (
    ({"T": (12, 5), "pool": BF16}, plain),
    ({"T": (1, 2, 3, 16), "pool": BF16, "tail": 5, "pitched": True}, plain),
    ({"T": (12, 5, 9), "pool": BF16}, padded),
    ({"T": (12, 16), "pool": BF16}, extreme),
    ({"T": (12, 5), "pool": BF16, "scale": 0.3, "allow_neg_eigval": True}, plain),
    ({"T": (12, 5), "pool": BF16, "use_qk_l2norm_in_kernel": False}, tame),
    (
        {"T": (16, 0, 7), "pool": FP16, "gate": FP32, "bias": BF16, "disable_state_update": False, "pitched": True},
        plain,
    ),
    ({"T": (12, 16), "pool": FP32, "H": 2, "HV": 6}, plain),
    ({"T": (12, 16), "pool": FP32, "H": 2, "HV": 6}, extreme),
    ({"T": (33, 0, 16), "pool": BF16, "V": 64, "disable_state_update": False}, plain),
)


@pytest.mark.costly
@pytest.mark.criterion("4.4")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("options", "change"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_bits(
    options: dict[str, Any], change: Callable[[Case], Case], device: torch.device, evidence: Evidence
) -> None:
    options = {"H": 1, "HV": 2, "device": device, **options}
    alone, behind = (change(make(prepass=prepass, **options)) for prepass in (False, True))
    alone.run()
    behind.run()
    for name in BUFFERS:
        x, y = (getattr(case, name).storage for case in (alone, behind))
        evidence.equal(f"{name}: elements that differ behind a prepass", different(x, y), 0)
    check(behind, evidence)
