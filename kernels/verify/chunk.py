"""Verify with per-token states in the chunk form (specs/design/chunk-form.md).

    Y_k, Y_q = K S_0^T, Q S_0^T     products of raw bf16 operands with fp32 sums
    A, B     = K K^T, Q K^T         likewise; the diagonals of K K^T and Q Q^T are the norms
    w_t, o_t                        the recurrence on these numbers alone: no token touches the state (steps.solve_row)
    S_t = e^{g_t} S_{t-1} + w_t k_t^T      stored for every token

One CTA owns `BV` = 32 rows of one value head of one request (`head_batch` > 1: 32 / head_batch rows of each of as many
value heads of one key head). Shared memory holds k, q, v of a block of 16 tokens and, until the solve, the state. A
warp stages and multiplies its own 8 rows, so a block has two barriers:

    tokens are there    warp 2: token products; warp 3: gates; each warp, when its rows are there: products with k and q
    products are there  each warp alone, for 8 rows: solve four tokens, update and store their states, next four

Loads are issued in the order in which they are needed: a load returns after those that the SM issued before it, and
only the states come from DRAM. In the solve four lanes share a row. Small grids and short requests store from
registers, the others by bulk copies: a warp's 8 rows at a time, from two buffers in turn, in the room that the state
has left.

A state that is not bf16 enters the products as two (fp16) or three (fp32) exact bf16 parts, and so does the fp32 state
carried from one block of 16 tokens to the next. Registers: at most 128 (168 with blocks). Shared memory: 38 KiB for a
16-bit pool, 54 KiB for fp32; 17 KiB more with blocks.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.tile import TM, each
from kernels.verify import rows, signature
from kernels.verify.config import PARTS, ROWS_PER_WARP, Config
from kernels.verify.rows import PADDING
from kernels.warp import QUAD

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
    "tl.disable_thread_storage_sync": True,  # what a warp keeps to itself needs no barrier of the block
}
WIDTHS = ((4, 0), (8, 4), (16, 8))  # the solve for at most so many tokens of a block, and more than
DIRECT_UP_TO_TOKENS = 5  # such requests store from registers too (specs/design/tuning.md)


def build(c: Config) -> Any:
    """The program, with the parameters of `signature.build`."""
    return signature.build(c, "verify_chunk", body)


@T.macro
def body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale):
    NT, N, SLOTS = q.shape[0], state_indices.shape[0], pool.shape[0]
    height = c.BV // c.head_batch  # rows of each of the heads of this CTA
    with T.Kernel(N * (c.HV // c.head_batch) * (c.V // height), threads=c.threads) as cta:
        signature.assume_wide(q, k, v, o, pool, pool if c.paged else states, 1 if c.paged else 2)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        v0 = cta % (c.V // height) * height
        h0 = cta // (c.V // height) % (c.HV // c.head_batch) * c.head_batch
        n = cta // (c.HV // c.head_batch * (c.V // height))
        # The 8 rows of this warp: from row `r0` of value head `h`.
        h = h0 + tx // 32 // (4 // c.head_batch)
        r0 = v0 + tx // 32 % (4 // c.head_batch) * ROWS_PER_WARP
        slot = T.alloc_var("int32")
        row = T.alloc_var("int32")
        start = T.alloc_var("int32")
        length = T.alloc_var("int32")
        end = T.alloc_var("int32")
        if c.paged:  # a table of slots in place of state_indices, tokens accepted before in place of state_rows
            row = T.max(T.min(state_rows[n], state_indices.shape[1]), 1) - 1
            slot = T.if_then_else(state_indices[n, row] >= states, state_indices[n, row], -1)
        else:
            slot = state_indices[n]
            row = state_rows[n]
        start = T.max(cu_seqlens[n], 0)
        length = T.min(cu_seqlens[n + 1], NT) - start
        end = T.max(cu_seqlens[N], 0)
        if slot >= 0 and slot < SLOTS:
            if c.paged:
                states, row = (state_indices, states), n
            _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, scale, N, NT, h0, v0, h, r0, tx)
        else:
            for t in T.serial(length):
                if tx % 32 < ROWS_PER_WARP:
                    o[start + t, h, r0 + tx % 32] = T.bfloat16(0)
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        for i in T.serial(T.max(T.ceildiv(NT - end - n, N), 0)):
            if tx % 32 < ROWS_PER_WARP:
                o[end + n + i * N, h, r0 + tx % 32] = T.bfloat16(0)


@T.macro
def _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, scale, N, NT, h0, v0, h, r0, tx):
    """All blocks of one request for the rows of this CTA."""
    ROWS, STEPS = (0, 0) if c.paged else (states.shape[0], states.shape[1])
    KQ_s = T.alloc_shared((2 * TM, c.K + QUAD), "bfloat16")  # padded: a quarter warp reads 2 rows without conflicts
    V_s = T.alloc_shared((TM, c.BV), "bfloat16")
    kk_s = T.alloc_shared((TM, TM + 4), "float32")
    qk_s = T.alloc_shared((TM, TM + 4), "float32")
    k_norm = T.alloc_shared((TM,), "float32")
    q_norm = T.alloc_shared((TM,), "float32")
    decay_s = T.alloc_shared((c.head_batch, TM), "float32")
    beta_s = T.alloc_shared((c.head_batch, TM), "float32")
    Y_s = T.alloc_shared((c.BV, 2 * TM + 4), "float32")
    w_s = T.alloc_shared((4, TM, ROWS_PER_WARP), "float32")
    o_s = T.alloc_shared((4, TM, ROWS_PER_WARP), "bfloat16")
    stage = T.alloc_shared((4 * 2 * ROWS_PER_WARP * c.K,), c.pool)  # of the stores; before them the state as loaded
    warp, lane = tx // 32, tx % 32
    g, quad = lane // 4, lane % 4
    head = warp // (4 // c.head_batch)
    pitch, wide = c.K + PADDING[c.pool], c.K + PADDING["float32"]
    S = T.alloc_local((c.K // 4,), "float32")  # of rows lane // 16 + 2 i of this warp, 8 columns each
    own = T.alloc_local((c.K // 4,), c.pool)
    R, Q = T.alloc_local((TM,), "float32"), T.alloc_local((4,), "float32")
    gate = [
        (T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype))
        for _ in each((c.head_batch + 1) // 2)
    ]
    if c.norms_given:
        norm = T.alloc_local((1,), "float32")
    few = N * (c.HV // c.head_batch) * (c.V * c.head_batch // c.BV) <= c.direct_up_to
    if c.blocks:
        carried_s = T.alloc_shared((c.BV * wide,), "float32")
        rows.stage_state(c, pool, slot, h, r0, stage, pitch, warp, lane)
        T.ptx_wait_group(0)
        T.sync_warp()
        rows.own_rows(c, stage, pitch, own, warp, lane)
        for i in T.unroll(c.K // 4):
            S[i] = T.cast(own[i], "float32")

    for block in T.serial(T.ceildiv(length, TM) if c.blocks else T.min(length, 1)):
        t0 = start + block * TM
        L = T.min(length - block * TM, TM)
        # In the order in which they are waited for: a load returns after those that were issued before it.
        if warp == 3:
            for i in each(len(gate)):
                _load_gates(c, gates, *gate[i], T.min(t0 + lane % TM, NT - 1), h0 + i * 2 + _second(c, lane))
        if c.norms_given and warp == 2:
            steps.load_given_norms(*gates[2:], norm, t0, h0 // (c.HV // c.H), L, lane)
        steps.stage_tokens(k, KQ_s, 0, t0, h0 // (c.HV // c.H), L, c.K, c.threads, tx)
        steps.stage_tokens(q, KQ_s, TM, t0, h0 // (c.HV // c.H), L, c.K, c.threads, tx)
        if tx < 4 * TM:
            of = tx % 4  # the warp whose 8 columns these are
            steps.stage_chunk(
                v, t0 + tx // 4, h0 + of // (4 // c.head_batch), v0 + of % (4 // c.head_batch) * ROWS_PER_WARP,
                V_s, tx // 4, of * ROWS_PER_WARP, tx // 4 < L,
            )  # fmt: skip
        T.ptx_commit_group()
        if c.blocks:
            rows.share_rows(c, S, carried_s, warp, lane)
        else:
            rows.stage_state(c, pool, slot, h, r0, stage, pitch, warp, lane)
        T.pdl_trigger()
        T.ptx_wait_group(0 if c.blocks else 1)
        T.sync_threads()
        if warp == 2:
            norms = (k_norm, q_norm, scale, c.l2norm, c.norms_given)
            steps.share_token_products(KQ_s, kk_s, qk_s, *norms, False, c.K, g, quad)
            if L > TM // 2:
                steps.share_token_products(KQ_s, kk_s, qk_s, *norms, True, c.K, g, quad)
            if c.norms_given:
                steps.share_given_norms(norm, k_norm, q_norm, scale, lane)
        if warp == 3:
            for i in each(len(gate)):
                if lane < TM * c.head_batch:
                    b = i * 2 + lane // TM
                    steps.share_gates(gates, *gate[i], c.raw_gates, decay_s, beta_s, b, lane % TM, lane % TM < L)
        if not c.blocks:
            T.ptx_wait_group(0)
        T.sync_warp()
        for tiles in (1, 2):
            if (L <= TM // 2) == (tiles == 1):
                state, width, parts = (carried_s, wide, PARTS["float32"]) if c.blocks else (stage, pitch, PARTS[c.pool])
                steps.share_readouts(KQ_s, state, width, parts, Y_s, warp * ROWS_PER_WARP, tiles, c.K, g, quad)
        if not c.blocks:
            rows.own_rows(c, stage, pitch, own, warp, lane)
        T.sync_threads()

        for tokens, above in WIDTHS:
            if L > above and L <= tokens:  # noqa: SIM300
                steps.load_readouts(Y_s, R, Q, tokens, warp, g, quad)
        if not c.blocks:
            for i in T.unroll(c.K // 4):
                S[i] = T.cast(own[i], "float32")
        for first in (0, 4, 8, 12):  # the stores of four tokens run while the next four are solved
            if first < L:
                for tokens, above in WIDTHS:
                    if tokens > first and L > above and L <= tokens:  # noqa: SIM300
                        steps.solve_steps(
                            R, Q, V_s, kk_s, qk_s, k_norm, q_norm, decay_s, beta_s, head, w_s, o_s, first, tokens,
                            warp, g, quad,
                        )  # fmt: skip
                T.sync_warp()
                # Hoisted: with the choice inside the loop a token costs 5 % more at one request.
                if few or length <= DIRECT_UP_TO_TOKENS:
                    for step in T.serial(T.min(L - first, 4)):
                        rows.next_state(c, S, KQ_s, w_s, decay_s, head, first + step, warp, lane)
                        if c.paged:
                            _keep_in_pool(c, S, stage, pool, *states, row, first + step, True, h, r0, warp, lane)
                        else:
                            if row >= 0 and row < ROWS and block * TM + first + step < STEPS:
                                rows.store_rows(c, S, states, (row, block * TM + first + step), h, r0, lane)
                else:
                    for step in T.serial(T.min(L - first, 4)):
                        rows.next_state(c, S, KQ_s, w_s, decay_s, head, first + step, warp, lane)
                        if c.paged:
                            _keep_in_pool(c, S, stage, pool, *states, row, first + step, False, h, r0, warp, lane)
                        else:
                            if row >= 0 and row < ROWS and block * TM + first + step < STEPS:
                                target = states[row, block * TM + first + step, h, r0, 0]
                                rows.bulk_store_rows(c, S, stage, step % 2, 1, target, warp, lane)
        if lane < L:
            for e in T.vectorized(ROWS_PER_WARP):
                o[t0 + lane, h, r0 + e] = o_s[warp, lane, e]
        if c.blocks:
            T.sync_threads()
    if c.commit and length > 0:
        rows.bulk_store_rows(c, S, stage, 0, 0, pool[slot, h, r0, 0], warp, lane)
    if lane == 0:
        T.tma_store_wait(0)


@T.macro
def _keep_in_pool(c, S, stage, pool, slots, lowest, n, t, direct: bool, h, r0, warp, lane):
    """Store the state after token t in the slot of its column, from registers or by a bulk copy."""
    slot = T.alloc_var("int32")
    slot = T.if_then_else(t < slots.shape[1], slots[n, T.min(t, slots.shape[1] - 1)], -1)
    if slot >= T.max(lowest, 0) and slot < pool.shape[0]:
        if direct:
            rows.store_rows(c, S, pool, (slot,), h, r0, lane)
        else:
            rows.bulk_store_rows(c, S, stage, t % 2, 1, pool[slot, h, r0, 0], warp, lane)


@T.macro
def _load_gates(c, gates, x, y, z, t, head):
    if c.raw_gates:
        steps.load_raw_gates(*gates, x, y, z, t, head)
    else:
        steps.load_activated_gates(*gates[:2], x, y, z, t, head)


def _second(c, lane):
    """The upper half of a warp has a second head if there is one."""
    return lane // TM if c.head_batch > 1 else 0
