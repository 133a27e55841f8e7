"""Commits of accepted tokens: a verify's guarded buffers, how many tokens were accepted, and where the states go.

What is expected are the snapshots of a verify in fp64, which keeps a state after every token: the state after L
accepted tokens is the one after token L - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import replay
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.replay.cases import split as limit_ctas
from tests.verify import cases
from tests.verify.cases import GUARD, Buffer, Case, Expected, relative_l2

#: bit patterns that arithmetic would change: zero with a sign, infinities, NaN
SPECIAL = (-0.0, torch.inf, -torch.inf, torch.nan)


@dataclasses.dataclass
class Commit(Case):
    accepted: Tensor
    targets: Tensor | None  # None: where the states came from


@dataclasses.dataclass
class Write:
    """What a request does to the pool."""

    request: int
    slot: int
    target: int
    length: int  # accepted tokens, as they count


def make(accepted: Sequence[int], T: int | Sequence[int], **options: Any) -> Commit:
    """`tests.verify.cases.make` with requests of T tokens (all the same, or each its own), the first ones accepted."""
    lengths = [T] * len(accepted) if isinstance(T, int) else list(T)
    case = cases.make(T=lengths, **{"steps": max([1, *lengths]), **options})
    case.rows = torch.arange(len(lengths), dtype=torch.int32, device=case.q.device)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    return Commit(**fields, accepted=torch.tensor(accepted, dtype=torch.int32, device=case.q.device), targets=None)


def elsewhere(case: Commit) -> Commit:
    """Every state goes to a slot that no request reads: the free ones from the last to the first."""
    taken = case.state_indices.tolist()
    free = [slot for slot in reversed(range(len(case.pool.view))) if slot not in taken]
    case.targets = torch.tensor(free[: len(taken)], dtype=torch.int32, device=case.accepted.device)
    return case


def run(case: Commit, max_tokens: int = 16) -> None:
    """Call the public function on the guarded pool of `case`."""
    replay.commit(
        case.A_log, case.a, case.dt_bias, case.k, case.v, case.b, case.pool.view, case.state_indices, case.cu_seqlens,
        case.accepted, target_indices=case.targets, max_tokens=max_tokens, **case.options,
    )  # fmt: skip


def split(monkeypatch: pytest.MonkeyPatch, ctas: int | None) -> None:
    """Calls run a program that starts at most so many CTAs; as `tests.replay.cases.split` does for verify."""
    limit_ctas(monkeypatch, ctas, replay.api, "fold_plan")


def keep(case: Commit) -> Commit:
    """What the pool holds now is what the next call finds."""
    case.pool.before = case.pool.storage.clone()
    return case


def again(case: Commit) -> Commit:
    """The same call on a pool of its own, as it was at first."""
    storage = case.pool.before.clone()
    view = case.pool.view
    view = storage.as_strided(view.shape, view.stride(), view.storage_offset())
    return dataclasses.replace(case, pool=Buffer(storage, view, case.pool.before))


def before(case: Case) -> Tensor:
    """The pool as it was."""
    return case.pool.before.as_strided(case.pool.view.shape, case.pool.view.stride(), GUARD)


def writes(case: Commit) -> list[Write]:
    """The requests that are no padding, with lengths within those of the request."""
    slots = range(len(case.pool.view))
    targets = case.state_indices if case.targets is None else case.targets
    given = zip(case.state_indices.tolist(), targets.tolist(), case.accepted.tolist(), case.lengths, strict=True)
    found = (Write(n, slot, target, max(0, min(L, T))) for n, (slot, target, L, T) in enumerate(given))
    return [write for write in found if write.slot in slots and write.target in slots]


def check_others(case: Commit) -> None:
    """Nothing was written but to the slots that are targets."""
    for buffer in (case.pool, case.o, case.states):
        assert buffer.gaps_intact(), "bytes outside a view changed"
    targets = [write.target for write in writes(case)]
    others = [slot for slot in range(len(case.pool.view)) if slot not in targets]
    assert not case.pool.changed()[others].any(), "a slot that is no target changed"


def check_commit(
    case: Commit, evidence: Evidence, expected: Expected | None = None, limit: float | None = None
) -> Expected:
    """Compare every request's state with fp64, with its old bits where nothing was accepted, and all else with what it
    was."""
    want = expected or case.expected()
    dtype = case.pool.view.dtype
    for write in writes(case):
        found = case.pool.view[write.target]
        if write.length:
            error = relative_l2(found, want.states[write.request, write.length - 1])
            name = f"a committed state in {str(dtype)[6:]}, relative L2 against fp64"
            evidence.at_most(name, error, ROUNDING[dtype] if limit is None else limit)
        else:
            changed = int((found.view(torch.uint8) != before(case)[write.slot].view(torch.uint8)).sum())
            evidence.equal("changed bytes of a state without accepted tokens", changed, 0)
    check_others(case)
    return want
