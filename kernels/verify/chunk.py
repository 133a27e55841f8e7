"""Verify with per-token states in the chunk form (specs/design/chunk-form.md).

    Y_k, Y_q = K S_0^T, Q S_0^T     products of raw bf16 operands with fp32 sums
    A, B     = K K^T, Q K^T         likewise; the diagonals of K K^T and Q Q^T are the norms
    w_t, o_t                        the recurrence on these numbers alone: no token touches the state (steps.solve_row)
    S_t = e^{g_t} S_{t-1} + w_t k_t^T      stored for every token

One CTA owns `BV` = 32 rows of one value head of one request (`head_batch` > 1: 32 / head_batch rows of each of as many
value heads of one key head). k, q, v of a block of 16 tokens lie in shared memory. Each of the four warps owns 8 rows
from the product to the stores and holds them twice: as the bf16 fragment of the product, and in fp32 as rows of 16
lanes, 8 columns a lane, as they are stored. Warps 0 to 2 also make the token products, warp 3 the gates: two barriers
a block, the rest is a warp's own. A warp stores its 8 rows with one bulk copy a token, from two buffers in turn.

A state that is not bf16 enters the product as two (fp16) or three (fp32) exact bf16 parts, and so does the fp32 state
carried from one block of 16 tokens to the next. Registers: at most 128, of which 32 the fp32 state.
Shared memory: 36 KiB for a bf16 pool, 52 KiB for fp32.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.tile import TM
from kernels.verify.config import PARTS, ROWS_PER_WARP, Config
from kernels.warp import CHUNK, QUAD, bulk_store

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_thread_storage_sync": True,  # what a warp keeps to itself needs no barrier of the block
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, a, b, A_log, dt_bias, pool, state_indices, cu_seqlens, o, states, state_rows, scale, beta_scale;
    without `raw_gates` g, beta stand in place of a, b, A_log, dt_bias, and there is no beta_scale.
    """
    NT, N, SLOTS, ROWS, STEPS = (T.dynamic(name) for name in ("NT", "N", "SLOTS", "ROWS", "STEPS"))
    ldq, ldk, ldv, ldo, ldp, ldr, lds = (T.dynamic(f"ld{x}") for x in ("q", "k", "v", "o", "p", "r", "s"))
    lda, ldb, la, lb = (T.dynamic(name) for name in ("lda", "ldb", "la", "lb"))
    head = c.V * c.K

    QT = T.StridedTensor((NT, c.H, c.K), (ldq, c.K, 1), "bfloat16")
    KT = T.StridedTensor((NT, c.H, c.K), (ldk, c.K, 1), "bfloat16")
    VT = T.StridedTensor((NT, c.HV, c.V), (ldv, c.V, 1), "bfloat16")
    OT = T.StridedTensor((NT, c.HV, c.V), (ldo, c.V, 1), "bfloat16")
    AT = T.StridedTensor((NT, c.HV), (lda, la), c.gate_dtype)
    BT = T.StridedTensor((NT, c.HV), (ldb, lb), c.gate_dtype)
    PoolT = T.StridedTensor((SLOTS, c.HV, c.V, c.K), (ldp, head, c.K, 1), c.pool)
    StatesT = T.StridedTensor((ROWS, STEPS, c.HV, c.V, c.K), (ldr, lds, head, c.K, 1), c.pool)
    IndexT, CuT, RowT = (T.Tensor((n,), "int32") for n in (N, N + 1, N))
    AlogT, BiasT = T.Tensor((c.HV,), "float32"), T.Tensor((c.HV,), c.bias_dtype)

    if c.raw_gates:

        @T.prim_func
        def verify_chunk_raw(
            q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
            pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
            scale: T.float32, beta_scale: T.float32,
        ):  # fmt: skip
            gates = (a, b, A_log, dt_bias, beta_scale)
            _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale)

        return verify_chunk_raw

    @T.prim_func
    def verify_chunk(
        q: QT, k: KT, v: VT, g: AT, beta: BT,
        pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
        scale: T.float32,
    ):  # fmt: skip
        _body(c, q, k, v, (g, beta), pool, state_indices, cu_seqlens, o, states, state_rows, scale)

    return verify_chunk


@T.macro
def _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale):
    NT, N, SLOTS = q.shape[0], state_indices.shape[0], pool.shape[0]
    rows = c.BV // c.head_batch  # of each of the heads of this CTA
    with T.Kernel(N * (c.HV // c.head_batch) * (c.V // rows), threads=c.threads) as cta:
        steps.assume_wide(q, 1)
        steps.assume_wide(k, 1)
        steps.assume_wide(v, 1)
        steps.assume_wide(o, 1)
        steps.assume_wide(pool, 1)
        steps.assume_wide(states, 2)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        v0 = cta % (c.V // rows) * rows
        h0 = cta // (c.V // rows) % (c.HV // c.head_batch) * c.head_batch
        n = cta // (c.HV // c.head_batch * (c.V // rows))
        # The 8 rows of this warp: from row `r0` of value head `h`.
        h = h0 + tx // 32 // (4 // c.head_batch)
        r0 = v0 + tx // 32 % (4 // c.head_batch) * ROWS_PER_WARP
        slot = T.alloc_var("int32")
        row = T.alloc_var("int32")
        start = T.alloc_var("int32")
        length = T.alloc_var("int32")
        end = T.alloc_var("int32")
        slot = state_indices[n]
        row = state_rows[n]
        start = T.max(cu_seqlens[n], 0)
        length = T.min(cu_seqlens[n + 1], NT) - start
        end = T.max(cu_seqlens[N], 0)
        if slot >= 0 and slot < SLOTS:
            _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, scale, h0, v0, h, r0, tx)
        else:
            for t in T.serial(length):
                if tx % 32 < ROWS_PER_WARP:
                    o[start + t, h, r0 + tx % 32] = T.bfloat16(0)
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        for i in T.serial(T.max(T.ceildiv(NT - end - n, N), 0)):
            if tx % 32 < ROWS_PER_WARP:
                o[end + n + i * N, h, r0 + tx % 32] = T.bfloat16(0)


@T.macro
def _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, scale, h0, v0, h, r0, tx):
    """All blocks of one request for the rows of this CTA."""
    ROWS, STEPS = states.shape[0], states.shape[1]
    KQ_s = T.alloc_shared((2 * TM, c.K + QUAD), "bfloat16")  # padded: a quarter warp reads 2 rows without conflicts
    V_s = T.alloc_shared((TM, c.BV), "bfloat16")
    kk_s = T.alloc_shared((TM, TM + 4), "float32")
    qk_s = T.alloc_shared((TM, TM + 4), "float32")
    k_norm = T.alloc_shared((TM,), "float32")
    q_norm = T.alloc_shared((TM,), "float32")
    decay_s = T.alloc_shared((c.head_batch, TM), "float32")
    beta_s = T.alloc_shared((c.head_batch, TM), "float32")
    Y_s = T.alloc_shared((4, ROWS_PER_WARP, 2 * TM + 4), "float32")
    w_s = T.alloc_shared((4, TM, ROWS_PER_WARP), "float32")
    stage = T.alloc_shared((4, 2, ROWS_PER_WARP, c.K), c.pool)
    warp, lane = tx // 32, tx % 32
    g, quad = lane // 4, lane % 4
    head = warp // (4 // c.head_batch)
    parts = 3 if c.blocks else PARTS[c.pool]
    S_parts = T.alloc_local((parts * c.K // 4,), "bfloat16")  # exact parts of the columns of row g in the product
    S = T.alloc_local((c.K // 4,), "float32")  # of rows lane // 16 + 2 i, 8 columns each
    stored = T.alloc_local((c.K // 4,), c.pool)
    o_t = T.alloc_local((4,), "float32")
    Y_k, Y_q = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")
    same_0, same_1 = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")

    if c.blocks:
        parts_s = T.alloc_shared((4, ROWS_PER_WARP, c.K + QUAD), "bfloat16")
    else:
        fragment = T.alloc_local((c.K // 4,), c.pool)
        for j in T.unroll(c.K // QUAD):
            for e in T.vectorized(CHUNK):
                fragment[j * CHUNK + e] = pool[slot, h, r0 + g, j * QUAD + quad * CHUNK + e]
    for i in T.unroll(4):
        for e in T.vectorized(CHUNK):
            stored[i * CHUNK + e] = pool[slot, h, r0 + i * 2 + lane // 16, lane % 16 * CHUNK + e]
    if c.blocks:
        for i in T.unroll(c.K // 4):
            S[i] = T.cast(stored[i], "float32")

    for block in T.serial(T.ceildiv(length, TM) if c.blocks else T.min(length, 1)):
        t0 = start + block * TM
        L = T.min(length - block * TM, TM)
        steps.stage_tokens(k, KQ_s, 0, t0, h0 // (c.HV // c.H), L, c.K, c.threads, tx)
        steps.stage_tokens(q, KQ_s, TM, t0, h0 // (c.HV // c.H), L, c.K, c.threads, tx)
        if tx < 4 * TM:
            of = tx % 4  # the warp whose 8 columns these are
            steps.stage_chunk(
                v, t0 + tx // 4, h0 + of // (4 // c.head_batch), v0 + of % (4 // c.head_batch) * ROWS_PER_WARP,
                V_s, tx // 4, of * ROWS_PER_WARP, tx // 4 < L,
            )  # fmt: skip
        if warp == 3:
            for i in T.unroll((c.head_batch + 1) // 2):
                if i * 2 + lane // TM < c.head_batch:
                    t = lane % TM
                    b = i * 2 + lane // TM
                    if c.raw_gates:
                        steps.raw_gates(*gates, decay_s, beta_s, b, t, t0 + t, h0 + b, t < L)
                    else:
                        steps.activated_gates(*gates, decay_s, beta_s, b, t, t0 + t, h0 + b, t < L)
        if c.blocks:
            _carried_parts(c, S, parts_s, S_parts, warp, lane)
        elif parts == 1:
            for i in T.unroll(c.K // 4):
                S_parts[i] = fragment[i]
        else:
            for part in tuple(range(parts)):
                for i in T.unroll(c.K // 4):
                    S_parts[part * (c.K // 4) + i] = steps.bf16_part(T.cast(fragment[i], "float32"), part)
        T.ptx_wait_group(0)
        T.sync_threads()

        T.clear(Y_k)
        T.clear(Y_q)
        T.clear(same_0)
        T.clear(same_1)
        steps.products(KQ_s, S_parts, parts, Y_k, Y_q, warp, same_0, same_1, c.K, g, quad)
        steps.share_gram(warp, same_0, same_1, kk_s, qk_s, k_norm, q_norm, scale, c.l2norm, g, quad)
        steps.share_rows(Y_k, Y_q, Y_s, warp, g, quad)
        T.sync_threads()

        for tokens in (4, 8, 12, 16):
            if L > tokens - 4 and L <= tokens:
                steps.solve_row(
                    Y_s, V_s, kk_s, qk_s, k_norm, q_norm, decay_s, beta_s, head, w_s, o_t, tokens, warp, g, quad
                )
        for m in T.unroll(4):
            if m * 4 + quad < L:
                o[t0 + m * 4 + quad, h, r0 + g] = T.cast(o_t[m], "bfloat16")
        T.sync_warp()

        if not c.blocks:
            for i in T.unroll(c.K // 4):
                S[i] = T.cast(stored[i], "float32")
        for t in T.serial(L):
            _next_state(S, KQ_s, w_s, decay_s, head, t, warp, lane)
            if row >= 0 and row < ROWS and block * TM + t < STEPS:
                _keep(c, S, stage, t % 2, 1, states[row, block * TM + t, h, r0, 0], warp, lane)
        if c.blocks:
            if lane == 0:
                T.tma_store_wait(0)
            T.sync_threads()
    if c.commit and length > 0:
        _keep(c, S, stage, 0, 0, pool[slot, h, r0, 0], warp, lane)
    if lane == 0:
        T.tma_store_wait(0)


@T.macro
def _carried_parts(c, S, parts_s, S_parts, warp, lane):
    """The bf16 parts of the state in registers, from the layout of the stores to that of the product."""
    for part in tuple(range(PARTS["float32"])):
        T.sync_warp()
        for i in T.unroll(4):
            for e in T.vectorized(CHUNK):
                parts_s[warp, i * 2 + lane // 16, lane % 16 * CHUNK + e] = steps.bf16_part(S[i * CHUNK + e], part)
        T.sync_warp()
        for j in T.unroll(c.K // QUAD):
            for e in T.vectorized(CHUNK):
                S_parts[part * (c.K // 4) + j * CHUNK + e] = parts_s[warp, lane // 4, j * QUAD + lane % 4 * CHUNK + e]


@T.macro
def _next_state(S, KQ_s, w_s, decay_s, head, t, warp, lane):
    """S = e^{g_t} S + w_t k_t^T"""
    k_t = T.alloc_local((CHUNK,), "bfloat16")
    w_t = T.alloc_local((4,), "float32")
    for e in T.vectorized(CHUNK):
        k_t[e] = KQ_s[t, lane % 16 * CHUNK + e]
    for i in T.vectorized(4):
        w_t[i] = w_s[warp, t, lane // 16 * 4 + i]
    for i in T.unroll(4):
        for e in T.unroll(CHUNK):
            S[i * CHUNK + e] = S[i * CHUNK + e] * decay_s[head, t] + w_t[i] * T.cast(k_t[e], "float32")


@T.macro
def _keep(c, S, stage, buffer, pending: int, target, warp, lane):
    """Start storing the 8 rows of this warp at `target`; at most `pending` earlier stores may still read `stage`."""
    if lane == 0:
        T.tma_store_wait(pending)
    T.sync_warp()
    for i in T.unroll(4):
        for e in T.vectorized(CHUNK):
            stage[warp, buffer, i * 2 + lane // 16, lane % 16 * CHUNK + e] = T.cast(S[i * CHUNK + e], c.pool)
    T.fence_proxy_async()
    T.sync_warp()
    if lane == 0:
        elements = ROWS_PER_WARP * c.K
        bulk_store(target, stage[warp, buffer, 0, 0], elements, elements * BYTES[c.pool])
