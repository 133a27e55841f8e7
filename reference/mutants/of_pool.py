"""Mutants of the gates, of the pool and of commit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reference import gating, pool
from reference.mutants.registry import Run, mutant


def _with_softplus(c: SimpleNamespace, positive: Tensor) -> tuple[Tensor, Tensor]:
    return -torch.exp(c.A_log) * positive, gating.beta(c.b, c.allow_neg_eigval)


@mutant("gating", needs="a + dt_bias beyond the range of exp, and a decay that is not yet zero there")
def softplus_overflows(c: SimpleNamespace, run: Run) -> Any:
    """log(1 + exp(x)) without the threshold: inf for large x."""
    return _with_softplus(c, torch.log(1 + torch.exp(c.a + c.dt_bias)))


@mutant("gating", needs="exp(A_log) = inf and softplus(a + dt_bias) = 0 for one head")
def infinity_times_zero(c: SimpleNamespace, run: Run) -> Any:
    """exp(A_log) * softplus(x) as it stands: inf * 0 = NaN."""
    return _with_softplus(c, gating.softplus(c.a + c.dt_bias))


@mutant("gating")
def bias_after_softplus(c: SimpleNamespace, run: Run) -> Any:
    """softplus(a) + dt_bias."""
    return _with_softplus(c, gating.softplus(c.a) + c.dt_bias)


@mutant("gating", subtle=True)
def bias_added_in_bf16(c: SimpleNamespace, run: Run) -> Any:
    """a + dt_bias is rounded to bf16."""
    return _with_softplus(c, gating.softplus((c.a + c.dt_bias).bfloat16().to(c.a.dtype)))


@mutant("gating")
def A_log_without_exp(c: SimpleNamespace, run: Run) -> Any:
    """A_log is taken for A."""
    return -c.A_log * gating.softplus(c.a + c.dt_bias), gating.beta(c.b, c.allow_neg_eigval)


@mutant("gating")
def decay_grows(c: SimpleNamespace, run: Run) -> Any:
    """The sign of g is lost: the state grows."""
    g, beta = run()
    return -g, beta


@mutant("gating", needs="allow_neg_eigval=True")
def neg_eigval_ignored(c: SimpleNamespace, run: Run) -> Any:
    """beta is not doubled."""
    c.allow_neg_eigval = False
    return run()


@mutant("gating")
def a_and_b_swapped(c: SimpleNamespace, run: Run) -> Any:
    """a gates the update and b the decay."""
    c.a, c.b = c.b, c.a
    return run()


def _live(c: SimpleNamespace) -> Iterator[tuple[int, int, int]]:
    """(slot, snapshot row, number of stored steps) of the requests that store snapshots."""
    if c.intermediate_states is None:
        return
    rows = range(len(c.state_indices)) if c.intermediate_indices is None else c.intermediate_indices.tolist()
    for n, slot in enumerate(c.state_indices.tolist()):
        length = int(c.cu_seqlens[n + 1] - c.cu_seqlens[n])
        if slot >= 0 and length and rows[n] >= 0:
            yield slot, rows[n], min(length, c.intermediate_states.shape[1])


@mutant("pool", needs="snapshots")
def snapshots_one_step_late(c: SimpleNamespace, run: Run) -> None:
    """Step t of the snapshots holds the state before token t."""
    before = c.ssm_states.clone()
    run()
    for slot, row, steps in _live(c):
        c.intermediate_states[row, 1:steps] = c.intermediate_states[row, : steps - 1].clone()
        c.intermediate_states[row, 0] = before[slot].to(c.intermediate_states.dtype)


@mutant("pool", needs="snapshots")
def snapshot_bands_swapped(c: SimpleNamespace, run: Run) -> None:
    """The two halves of V trade places in the snapshots."""
    run()
    for _, row, steps in _live(c):
        stored = c.intermediate_states[row, :steps]
        stored.copy_(stored.roll(stored.shape[-2] // 2, dims=-2))


@mutant("pool")
def output_bands_swapped(c: SimpleNamespace, run: Run) -> None:
    """The two halves of V trade places in o."""
    run()
    c.o.copy_(c.o.roll(c.o.shape[-1] // 2, dims=-1))


@mutant("pool", needs="snapshots with room beyond a request's last token")
def snapshots_fill_the_row(c: SimpleNamespace, run: Run) -> None:
    """The steps beyond a request's last token are zeroed."""
    run()
    for _, row, steps in _live(c):
        c.intermediate_states[row, steps:] = 0


@mutant("pool", needs="intermediate_indices that are not 0, 1, ...")
def snapshot_rows_ignored(c: SimpleNamespace, run: Run) -> None:
    """Request n's snapshots go to row n."""
    c.intermediate_indices = None
    run()


@mutant("pool", needs="a padded request that has tokens")
def padding_uses_slot_0(c: SimpleNamespace, run: Run) -> None:
    """A negative slot is taken for slot 0."""
    c.state_indices = c.state_indices.clamp(min=0)
    run()


@mutant("pool", needs="a padded request whose v holds NaN")
def padding_multiplied_by_zero(c: SimpleNamespace, run: Run) -> None:
    """A padded request's output is 0 * v, which keeps NaN."""
    run()
    for n, slot in enumerate(c.state_indices.tolist()):
        if slot < 0:
            tokens = slice(int(c.cu_seqlens[n]), int(c.cu_seqlens[n + 1]))
            c.o[tokens] = (0 * c.v[tokens]).to(c.o.dtype)


@mutant("pool", needs="an o longer than cu_seqlens[-1]")
def tail_left_as_it_was(c: SimpleNamespace, run: Run) -> None:
    """Rows of o beyond the last request are not written."""
    end = int(c.cu_seqlens[-1])
    before = c.o[end:].clone()
    run()
    c.o[end:] = before


@mutant("pool", needs="requests of different lengths")
def lengths_ignored(c: SimpleNamespace, run: Run) -> None:
    """The tokens are split evenly among the requests."""
    N, end = len(c.state_indices), int(c.cu_seqlens[-1])
    c.cu_seqlens = torch.tensor([n * end // N for n in range(N + 1)], dtype=torch.int32)
    run()


@mutant("pool", needs="commit=False")
def commit_unasked(c: SimpleNamespace, run: Run) -> None:
    """The last state is stored in the pool without commit."""
    c.commit = True
    run()


@mutant("pool", needs="commit=True")
def commit_one_step_short(c: SimpleNamespace, run: Run) -> None:
    """The state before the last token is committed."""
    if c.commit:
        starts, ends = c.cu_seqlens[:-1], c.cu_seqlens[1:]
        before, o = c.ssm_states.clone(), c.o
        run()
        states, c.ssm_states, c.o = c.ssm_states, before, o.clone()
        rows = torch.arange(len(starts))
        c.intermediate_states = states.new_empty(len(starts), int((ends - starts).max()), *states.shape[1:])
        c.intermediate_indices, c.commit = rows, False
        run()
        pool.commit(states, c.state_indices, c.intermediate_states, rows, ends - starts - 2)
    else:
        run()


@mutant("commit", needs="a step above 0")
def step_off_by_one(c: SimpleNamespace, run: Run) -> None:
    """The state before the last accepted token is copied."""
    c.steps = torch.where(c.steps > 0, c.steps - 1, c.steps)
    run()


@mutant("commit", needs="a negative step")
def negative_step_wraps(c: SimpleNamespace, run: Run) -> None:
    """A negative step counts from the end instead of being skipped."""
    c.steps = c.steps % c.intermediate_states.shape[1]
    run()


@mutant("commit", needs="rows that are not 0, 1, ...")
def rows_ignored(c: SimpleNamespace, run: Run) -> None:
    """Request n's snapshots are taken from row n."""
    c.rows = torch.arange(len(c.rows))
    run()
