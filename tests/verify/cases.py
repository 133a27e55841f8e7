"""Inputs of a verify with guarded buffers, its fp64 result, and the comparison between the two.

Inputs look like the field's: q, k, v are strided views of one mixed row, the pool and the snapshot buffer may have any
pitch, and every byte outside the views is a canary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import reference.lossless
import reference.pool
import reference.recurrence
from kernels import verify
from kernels.runtime import Program
from tests.limits import ROUNDING

GUARD = 64  # canary elements before and after a buffer; keeps 16-byte alignment


@dataclasses.dataclass
class Buffer:
    """A tensor inside a larger storage whose other elements must not change."""

    storage: Tensor
    view: Tensor
    before: Tensor  # copy of the storage as made

    @classmethod
    def make(cls, values: Tensor, gaps: Sequence[int] = ()) -> Buffer:
        """Place `values` in a storage with gaps[i] extra elements in the pitch of dimension i."""
        strides, size = [1] * values.dim(), 1
        for dim in reversed(range(values.dim())):
            strides[dim] = size
            size *= values.shape[dim]
            if dim and dim <= len(gaps):
                size += gaps[dim - 1]
        storage = torch.full((size + 2 * GUARD,), -77.0, dtype=values.dtype, device=values.device)
        view = storage.as_strided(values.shape, strides, GUARD)
        view.copy_(values)
        return cls(storage, view, storage.clone())

    def changed(self) -> Tensor:
        """Boolean mask over the view: which elements differ in their bits from those made."""
        return self.differs().as_strided(self.view.shape, self.view.stride(), GUARD)

    def gaps_intact(self) -> bool:
        outside = torch.ones_like(self.storage, dtype=torch.bool)
        outside.as_strided(self.view.shape, self.view.stride(), GUARD).fill_(False)
        return not bool((self.differs() & outside).any())

    def differs(self) -> Tensor:
        """Boolean mask over the storage: which elements differ in their bits from those made."""
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.storage.element_size()]
        return self.storage.view(width) != self.before.view(width)


@dataclasses.dataclass
class Case:
    """One call: inputs, guarded buffers, options of the public function."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    pool: Buffer
    state_indices: Tensor
    cu_seqlens: Tensor
    o: Buffer
    states: Buffer
    rows: Tensor
    options: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def run(self, function: Callable[..., Any] | None = None) -> None:
        """Call the public function (or one of its signature) on the guarded buffers."""
        (function or verify.recurrent_gated_delta_rule_verify)(
            self.A_log,
            self.a,
            self.dt_bias,
            self.q,
            self.k,
            self.v,
            self.b,
            self.pool.view,
            self.state_indices,
            self.cu_seqlens,
            self.states.view,
            self.rows,
            o=self.o.view,
            **self.options,
        )

    def expected(self) -> Expected:
        """The fp64 result; NaN in `states` where nothing is stored. Unrounded, but for states that are `lossless`."""
        N = self.state_indices.numel()
        pool = self.pool.before.as_strided(self.pool.view.shape, self.pool.view.stride(), GUARD).double().contiguous()
        states = torch.full(self.states.view.shape, torch.nan, dtype=torch.float64, device=pool.device)
        o = torch.full(self.o.view.shape, torch.nan, dtype=torch.float64, device=pool.device)
        options = dict(self.options)
        commit = not options.pop("disable_state_update", True)
        options.pop("fuse_gating", None)
        options.pop("cache_steps", None)
        options.pop("head_batch", None)
        options.pop("prepass", None)
        stored_as = reference.lossless.stored_as(self.pool.view.dtype)
        recurrence = stored_as if options.pop("lossless", False) else reference.recurrence.recurrent
        inputs = {name: getattr(self, name).double() for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        reference.pool.verify_gated_fwd(
            ssm_states=pool,
            state_indices=self.state_indices,
            cu_seqlens=self.cu_seqlens,
            o=o,
            intermediate_states=states,
            intermediate_indices=self.rows[:N],
            commit=commit,
            dtype=torch.float64,
            recurrence=recurrence,
            **inputs,
            **options,
        )
        return Expected(o, states, pool)


@dataclasses.dataclass
class Expected:
    o: Tensor
    states: Tensor
    pool: Tensor


def make(
    N: int = 2,
    T: int | Sequence[int] = 12,
    H: int = 2,
    HV: int = 4,
    *,
    V: int = 128,
    K: int = 128,
    pool: torch.dtype = torch.bfloat16,
    steps: int | None = None,
    slots: int | None = None,
    tail: int = 0,
    pitched: bool = False,
    bias: torch.dtype = torch.float32,
    gate: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Case:
    """Random inputs. `T`: tokens of every request, or a length per request; `tail`: output rows of no request;
    `pitched`: gaps between the slots, snapshot rows and steps, and output rows, and strided a, b."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [T] * N if isinstance(T, int) else list(T)
    N, NT = len(lengths), sum(lengths) + tail
    slots, steps = slots or N + 2, max(lengths, default=1) if steps is None else steps

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    mixed = normal(NT, 2 * H * K + HV * V + (8 if pitched else 0))
    q, k, v = (
        mixed[:, start : start + heads * dim].view(NT, heads, dim)
        for start, heads, dim in ((0, H, K), (H * K, H, K), (2 * H * K, HV, V))
    )
    ba = normal(NT, HV, 2, dtype=gate)
    a, b = (ba[..., 0], ba[..., 1]) if pitched else (ba[..., 0].contiguous(), ba[..., 1].contiguous())
    state = (normal(slots, HV, V, K, dtype=torch.float32) * 0.5).to(pool)
    unset = torch.full((N + 1, steps, HV, V, K), torch.nan, dtype=pool, device=device)
    order = torch.randperm(slots, generator=rng)
    return Case(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=(torch.rand(HV, generator=rng) * 2).to(device),
        dt_bias=normal(HV, dtype=bias),
        pool=Buffer.make(state, (16,) if pitched else ()),
        state_indices=order[:N].int().to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        o=Buffer.make(torch.full((NT, HV, V), torch.nan, dtype=torch.bfloat16, device=device), (8,) if pitched else ()),
        states=Buffer.make(unset, (32, 24) if pitched else ()),
        rows=torch.randperm(N + 1, generator=rng).int().to(device),
        options=options,
    )


def padded(case: Case) -> Case:
    """Request 1 becomes padding whose inputs hold NaN."""
    case.state_indices[1] = -1
    for x in (case.q, case.k, case.v, case.a, case.b):
        x[case.cu_seqlens[1] : case.cu_seqlens[2]] = torch.nan
    return case


def store_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of CTAs stores states by bulk copies, which otherwise only large grids do."""
    plan = verify.api.plan

    def in_bulk(**facts: Any) -> Program:
        program = plan(**facts)
        return dataclasses.replace(program, config=dataclasses.replace(program.config, direct_up_to=0))

    monkeypatch.setattr(verify.api, "plan", in_bulk)


def check_memory(case: Case) -> None:
    """After a call whose lengths make no sense: nothing was written but to the rows and slots that its indices name."""
    for buffer in (case.pool, case.o, case.states):
        assert buffer.gaps_intact(), "bytes outside a view changed"
    others = [row for row in range(len(case.states.view)) if row not in case.rows[: len(case.lengths)].tolist()]
    assert not case.states.changed()[others].any(), "a snapshot row of no request changed"
    others = [slot for slot in range(len(case.pool.view)) if slot not in case.state_indices.tolist()]
    assert not case.pool.changed()[others].any(), "a slot of no request changed"


def relative_l2(x: Tensor, y: Tensor) -> float:
    """||x - y|| / ||y|| in fp64; inf where x is not finite."""
    error = ((x.double() - y).norm() / y.norm().clamp(min=1e-300)).item()
    return error if error == error else float("inf")


def check(case: Case, evidence: Any, expected: Expected | None = None) -> Expected:
    """Compare what the call left in the buffers of `case` with fp64, and everything else with what it was."""
    want = expected or case.expected()
    dtype = case.pool.view.dtype
    covered = int(case.cu_seqlens[-1])
    assert not case.o.view[covered:].any(), "output rows of no request are not zero"
    if want.o.any():
        evidence.at_most("o, relative L2 against fp64", relative_l2(case.o.view, want.o), ROUNDING[torch.bfloat16])
    else:
        assert not case.o.view.any()
    stored = ~want.states.isnan()
    if stored.any():
        error = relative_l2(case.states.view[stored], want.states[stored])
        evidence.at_most(f"states in {str(dtype)[6:]}, relative L2 against fp64", error, ROUNDING[dtype])
    assert not case.states.changed()[~stored].any(), "a snapshot was written where none belongs"
    for buffer in (case.pool, case.o, case.states):
        assert buffer.gaps_intact(), "bytes outside a view changed"
    if case.options.get("disable_state_update", True):
        assert not case.pool.changed().any(), "the pool changed without a commit"
    else:
        slots = range(len(case.pool.view))
        live = [s for s, n in zip(case.state_indices.tolist(), case.lengths, strict=True) if s in slots and n]
        others = [s for s in slots if s not in live]
        assert not case.pool.changed()[others].any(), "a slot of no request changed"
        if live:
            error = relative_l2(case.pool.view[live], want.pool[live])
            evidence.at_most(f"committed {str(dtype)[6:]} slots, relative L2", error, ROUNDING[dtype])
    return want
