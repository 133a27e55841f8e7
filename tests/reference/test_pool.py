"""The pool contract: who is read, what is stored where and in which precision, what stays untouched."""

from __future__ import annotations

import pytest
import torch

from reference import pool
from reference.pool import decode, verify_fwd, verify_gated_fwd
from reference.recurrence import recurrent
from tests.gate_engine import Evidence
from tests.reference import exact
from tests.reference.cases import FP64_LIMIT, rel_l2
from tests.reference.scenario import POISON, SCENARIOS, Batch, Scenario, batch_and_expectation, deviation


@pytest.mark.criterion("1.8")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_verify(scenario: Scenario, evidence: Evidence) -> None:
    batch, expected = batch_and_expectation(scenario)
    evidence.at_most("rel L2, all buffers", deviation(batch.run(verify_gated_fwd), expected), FP64_LIMIT)


@pytest.mark.criterion("1.8")
def test_padding_and_tail_are_exactly_zero() -> None:
    batch = Batch(Scenario())
    o = batch.run(verify_gated_fwd).o
    assert batch.v[batch.tokens(2)].isnan().all()
    assert o[batch.tokens(2)].count_nonzero() == 0 and o[-batch.TAIL :].count_nonzero() == 0


@pytest.mark.criterion("1.8")
def test_a_slot_beyond_the_pool_is_padding() -> None:
    batch = Batch(Scenario(commit=True))
    padded = batch.run(verify_gated_fwd)
    batch.state_indices[2] = batch.SLOTS
    assert deviation(batch.run(verify_gated_fwd), padded) == 0.0


@pytest.mark.criterion("1.8")
def test_without_snapshots_and_commit_only_o_is_written() -> None:
    batch = Batch(Scenario(snapshots=False))
    after = batch.run(verify_gated_fwd)
    assert torch.equal(after.pool_storage, batch.before.pool_storage)
    assert (after.o != POISON).all()


@pytest.mark.criterion("1.8")
def test_duplicates_read_the_pool_as_it_was() -> None:
    """Requests 0 and 4 share slot 3. Giving request 4 a slot of its own with the same state changes nothing."""
    batch = Batch(Scenario(commit=True))
    shared = batch.run(verify_gated_fwd)
    batch.pool(batch.before.pool_storage)[2] = batch.pool(batch.before.pool_storage)[3]
    batch.state_indices[4] = 2
    apart = batch.run(verify_gated_fwd)
    assert torch.equal(shared.o, apart.o)
    assert torch.equal(batch.pool(shared.pool_storage)[3], batch.pool(apart.pool_storage)[2])


@pytest.mark.criterion("1.8")
def test_default_and_padded_snapshot_rows() -> None:
    batch = Batch(Scenario())
    batch.intermediate_indices = torch.arange(batch.ROWS, dtype=torch.int32)
    in_order = batch.run(verify_gated_fwd).snapshots
    batch.intermediate_indices = None  # type: ignore[assignment]
    by_default = batch.run(verify_gated_fwd).snapshots
    batch.intermediate_indices = torch.tensor([-1, 1, 2, 3, 4, batch.ROWS], dtype=torch.int32)
    without_two = batch.run(verify_gated_fwd).snapshots
    assert in_order is not None and by_default is not None and without_two is not None
    assert torch.equal(in_order, by_default)
    assert (without_two[0] == POISON).all() and torch.equal(without_two[1:5], in_order[1:5])
    assert (without_two[5:] == POISON).all()


@pytest.mark.criterion("1.8")
def test_preactivated_gates() -> None:
    batch = Batch(Scenario(commit=True))
    expected, after = batch.run(verify_gated_fwd), batch.before.clone()
    g, beta = torch.nan_to_num(batch.a), torch.nan_to_num(batch.b)
    g, beta = exact.gates(batch.A_log, g, batch.dt_bias, beta, False)
    where = (batch.pool(after.pool_storage), batch.state_indices, batch.cu_seqlens, after.o, after.snapshots)
    rows, fp64 = batch.intermediate_indices, torch.float64
    verify_fwd(batch.q, batch.k, batch.v, g, beta, *where, rows, commit=True, dtype=fp64)
    assert deviation(after, expected) < FP64_LIMIT


@pytest.mark.criterion("1.9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_only_stored_copies_are_rounded(dtype: torch.dtype) -> None:
    """bf16 snapshots and pool hold the rounding of what wide buffers hold; o does not see them."""
    narrow, wide = (Batch(Scenario(commit=True)) for _ in range(2))
    pool_16 = narrow.pool(narrow.before.pool_storage).bfloat16()
    wide.pool(wide.before.pool_storage).copy_(pool_16)
    assert narrow.before.snapshots is not None and wide.before.snapshots is not None
    snapshots_16, o_16 = narrow.before.snapshots.bfloat16(), narrow.before.o.bfloat16()
    results = []
    for b, states, o, snapshots in (
        (narrow, pool_16, o_16, snapshots_16),
        (wide, wide.pool(wide.before.pool_storage), wide.before.o, wide.before.snapshots),
    ):
        raw = (b.q, b.k, b.v, b.a, b.b, b.A_log, b.dt_bias)
        where = (states, b.state_indices, b.cu_seqlens, o, snapshots, b.intermediate_indices)
        verify_gated_fwd(*raw, *where, commit=True, dtype=dtype)
        results.append((states, o, snapshots))
    for stored, unrounded in zip(*results, strict=True):
        assert stored.dtype == torch.bfloat16 and unrounded.dtype == torch.float64
        assert torch.equal(stored, unrounded.bfloat16())


@pytest.mark.criterion("1.9")
def test_beta_is_not_rounded() -> None:
    """b is bf16, sigmoid(b) is not: the result is the recurrence's with the wide sigmoid."""
    b = Batch(Scenario())
    tokens, o = b.tokens(0), torch.empty(7, b.HV, 24, dtype=torch.float64)
    raw = b.raw(tokens, torch.bfloat16)
    states = b.pool(b.before.pool_storage)
    ends, slot = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    verify_gated_fwd(*raw, b.A_log, b.dt_bias, states, slot, ends, o, dtype=torch.float64)
    g, beta = exact.gates(b.A_log, raw[3], b.dt_bias, raw[4], False)
    expected, _ = recurrent(raw[0], raw[1], raw[2], g, beta, states[3], use_qk_l2norm=True)
    assert rel_l2(o, expected) < FP64_LIMIT


@pytest.mark.criterion("1.10")
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_decode_steps_equal_one_verify(neg_eigval: bool, evidence: Evidence) -> None:
    """With an fp64 pool nothing is rounded in between, so T decode calls are one verify with commit."""
    b = Batch(Scenario(commit=True, neg_eigval=neg_eigval))
    verified, storage = b.run(verify_gated_fwd), b.before.clone().pool_storage
    for t, token in enumerate(range(*b.tokens(0).indices(99))):
        raw = b.raw(slice(token, token + 1))
        o, slot = torch.empty(1, b.HV, 24, dtype=torch.float64), torch.tensor([3], dtype=torch.int32)
        decode(*raw, b.A_log, b.dt_bias, b.pool(storage), slot, o, allow_neg_eigval=neg_eigval, dtype=torch.float64)
        evidence.at_most("o rel L2", rel_l2(o[0], verified.o[token]), FP64_LIMIT)
        if t < b.scenario.D and verified.snapshots is not None:
            state = verified.snapshots[b.rows[0], t]
            evidence.at_most("state rel L2", rel_l2(b.pool(storage)[3], state), FP64_LIMIT)


@pytest.mark.criterion("1.10")
def test_decode_reads_and_writes_other_slots() -> None:
    """Requests: 0 -> 1, 1 -> 2 (reads what was in 1 at entry), 3 not stored, padded, 4 in place."""
    b = Batch(Scenario())
    raw = b.raw(slice(5))  # of request 0, which has no NaN
    raw[2][3] = torch.nan
    read = torch.tensor([0, 1, 3, -1, 4], dtype=torch.int32)
    write = torch.tensor([1, 2, -1, 0, 4], dtype=torch.int32)
    storage, o = b.before.clone().pool_storage, torch.full((5, b.HV, 24), POISON, dtype=torch.float64)
    decode(*raw, b.A_log, b.dt_bias, b.pool(storage), read, o, write, dtype=torch.float64)
    g, beta = exact.gates(b.A_log, raw[3], b.dt_bias, raw[4], False)
    before, after = b.pool(b.before.pool_storage), b.pool(storage)
    expected = before.clone()
    for n, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
        if source < 0:
            assert o[n].count_nonzero() == 0
            continue
        q, k, v, g_n, beta_n = (x[n : n + 1] for x in (*raw[:3], g, beta))
        out, states = recurrent(q, k, v, g_n, beta_n, before[source], use_qk_l2norm=True)
        assert rel_l2(o[n], out[0]) < FP64_LIMIT
        if target >= 0:
            expected[target] = states[0]
    assert torch.equal(after[[0, 3]], before[[0, 3]])
    assert rel_l2(after, expected) < FP64_LIMIT


@pytest.mark.criterion("1.11")
def test_commit() -> None:
    """Steps are accepted tokens minus one; a negative step or slot is skipped, the last of two writes wins."""
    snapshots = torch.arange(4 * 3 * 2 * 2 * 2, dtype=torch.float32).reshape(4, 3, 2, 2, 2)
    destination = torch.full((5, 2, 2, 2), POISON, dtype=torch.bfloat16)
    expected = destination.clone()
    expected[2], expected[0] = snapshots[3, 2].bfloat16(), snapshots[1, 1].bfloat16()
    slots, rows, steps = [2, 4, -1, 0, 0], [3, 2, 0, 0, 1], [2, -1, 1, 0, 1]
    pool.commit(destination, torch.tensor(slots), snapshots, torch.tensor(rows), torch.tensor(steps))
    assert torch.equal(destination, expected)


@pytest.mark.criterion("1.11")
@pytest.mark.parametrize("accepted", range(1, 7))
def test_committed_prefix_equals_a_shorter_verify(accepted: int, evidence: Evidence) -> None:
    """Verify seven, accept some, commit: the pool is as after a verify of only those with commit."""
    b = Batch(Scenario())
    after = b.run(verify_gated_fwd)
    assert after.snapshots is not None
    rows, steps = torch.tensor([b.rows[0]]), torch.tensor([accepted - 1])
    pool.commit(b.pool(after.pool_storage), torch.tensor([3]), after.snapshots, rows, steps)
    direct, tokens = b.before.clone(), slice(0, accepted)
    raw = b.raw(tokens)
    ends, slot = torch.tensor([0, accepted], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    where = (b.pool(direct.pool_storage), slot, ends, direct.o[tokens])
    verify_gated_fwd(*raw, b.A_log, b.dt_bias, *where, commit=True, dtype=torch.float64)
    evidence.at_most("pool rel L2", rel_l2(after.pool_storage, direct.pool_storage), FP64_LIMIT)
