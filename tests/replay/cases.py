"""The cases of gate 3 without stored states: the same guarded buffers, the same fp64 result, the same comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from kernels import replay
from kernels.runtime import Program
from tests.verify import cases
from tests.verify.cases import Buffer, Case, check, check_memory, padded, relative_l2

__all__ = ["Buffer", "Case", "check", "check_memory", "make", "padded", "relative_l2", "run", "split"]


def make(*args: Any, **kwargs: Any) -> Case:
    """`tests.verify.cases.make` with a snapshot buffer of one step that no request names, so that nothing is stored."""
    case = cases.make(*args, **{"steps": 1, **kwargs})
    case.rows.fill_(-1)
    return case


def run(case: Case, max_tokens: int = 16) -> Tensor:
    """Call the public function on the guarded buffers of `case`."""
    return replay.verify(
        case.A_log, case.a, case.dt_bias, case.q, case.k, case.v, case.b, case.pool.view, case.state_indices,
        case.cu_seqlens, max_tokens=max_tokens, o=case.o.view, **case.options,
    )  # fmt: skip


def split(monkeypatch: pytest.MonkeyPatch, ctas: int | None, module: Any = replay.api, plan: str = "plan") -> None:
    """Calls run a program that starts at most so many CTAs, each with as many pieces of the work as that takes.

    With a few of them all work has the larger tile. None: as `plan`, which `module` calls, says.
    """
    if ctas is None:
        return
    planned = getattr(module, plan)

    def with_ctas(**facts: Any) -> Program:
        program = planned(**facts)
        return dataclasses.replace(program, config=dataclasses.replace(program.config, ctas=ctas))

    monkeypatch.setattr(module, plan, with_ctas)
