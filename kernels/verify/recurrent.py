"""Verify with per-token states, one token after the other, each rounded as a decode call would round it: `lossless`.

    d = e^g;  u = beta (v - d S k);  o = d S q + u (k . q);  S = round(d S + u k^T)        stored for every token

Outputs, snapshots and the committed state equal those of T calls of one token each, bit for bit; the arithmetic is
fixed in kernels/recurrent_steps.py, independent of what follows.

One CTA owns `BV` rows of one value head of one request. `lanes` neighbouring lanes share a row and hold it in
registers, packed as in the pool (K / lanes elements a lane) and widened while a token is applied. Per block of 16
tokens, half a warp normalises k and q of a token and leaves them in shared memory in fp32, thread t leaves the gates
of token t there; after one barrier each warp goes through the tokens by itself. States are loaded and stored by 16-byte
vectors straight from and to registers.

Registers: at most 96. Shared memory: 17.25 KiB at BV = 32.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import recurrent_steps as token
from kernels.recurrent_steps import CHUNK
from kernels.tile import TM
from kernels.verify import signature
from kernels.verify.config import RecurrentConfig as Config

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_thread_storage_sync": True,  # the barriers are where the steps say
}
STAGING_LANES = 16  # that share the k and q of one token
DECAY, BETA, KQ = 0, 1, 2  # columns of a token's coefficients; the fourth keeps a row at 16 bytes


def build(c: Config) -> Any:
    """The program, with the parameters of `signature.build`."""
    return signature.build(c, "verify_recurrent", _body)


@T.macro
def _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale):
    NT, N, SLOTS = q.shape[0], state_indices.shape[0], pool.shape[0]
    v_tiles = c.V // c.BV
    with T.Kernel(N * c.HV * v_tiles, threads=c.threads) as cta:
        signature.assume_wide(q, k, v, o, pool, states)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        v0 = cta % v_tiles * c.BV
        h = cta // v_tiles % c.HV
        n = cta // (v_tiles * c.HV)
        slot = T.alloc_var("int32")
        start = T.alloc_var("int32")
        length = T.alloc_var("int32")
        end = T.alloc_var("int32")
        slot = state_indices[n]
        start = T.max(cu_seqlens[n], 0)
        length = T.min(cu_seqlens[n + 1], NT) - start
        end = T.max(cu_seqlens[N], 0)
        if slot >= 0 and slot < SLOTS:
            _request(c, q, k, v, gates, pool, slot, start, length, o, states, state_rows[n], scale, h, v0, tx)
        else:
            for t in T.serial(length):
                if tx < c.BV:
                    o[start + t, h, v0 + tx] = T.bfloat16(0)
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        for i in T.serial(T.max(T.ceildiv(NT - end - n, N), 0)):
            if tx < c.BV:
                o[end + n + i * N, h, v0 + tx] = T.bfloat16(0)


@T.macro
def _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, scale, h, v0, tx):
    """All tokens of one request for BV rows of one value head."""
    rows, chunks = c.rows, c.K // CHUNK // c.lanes
    state = T.alloc_local((rows, chunks, CHUNK), c.pool)
    S = T.alloc_local((rows, chunks, CHUNK), "float32")
    key = T.alloc_local((chunks, CHUNK), "float32")
    query = T.alloc_local((chunks, CHUNK), "float32")
    v_t = T.alloc_local((rows,), "float32")
    o_t = T.alloc_local((rows,), "float32")
    K_s = T.alloc_shared((TM, c.K), "float32")
    Q_s = T.alloc_shared((TM, c.K), "float32")
    V_s = T.alloc_shared((TM, c.BV), "bfloat16")
    coef_s = T.alloc_shared((TM, 4), "float32")
    stored = T.alloc_var("int32")  # tokens whose state is kept
    stored = T.if_then_else(row >= 0 and row < states.shape[0], states.shape[1], 0)
    # Row r of this lane, and its place among the lanes of a row.
    lane = tx % 32
    i0 = tx // 32 * (32 // c.lanes * rows) + lane // c.lanes
    col = lane % c.lanes

    if length > 0:
        token.load_rows(pool, (slot, h), v0 + i0, col, state, rows, chunks, c.lanes)
    for block in T.serial(T.ceildiv(length, TM)):
        t0 = start + block * TM
        L = T.min(length - block * TM, TM)
        if block > 0:
            T.sync_threads()
        _stage(c, q, k, v, gates, K_s, Q_s, V_s, coef_s, t0, L, scale, h, v0, tx)
        T.sync_threads()
        for t in T.serial(L):
            token.load_vector(K_s, t, col, key, chunks, c.lanes)
            token.load_vector(Q_s, t, col, query, chunks, c.lanes)
            for r in T.unroll(rows):
                v_t[r] = T.cast(V_s[t, i0 + r * (32 // c.lanes)], "float32")
            token.widen(state, S, rows, chunks)
            token.advance(
                S, key, query, v_t, coef_s[t, DECAY], coef_s[t, BETA], coef_s[t, KQ], o_t, rows, chunks, c.lanes
            )
            token.narrow(S, state, rows, chunks)
            for r in T.unroll(rows):
                if col == r:
                    o[t0 + t, h, v0 + i0 + r * (32 // c.lanes)] = T.cast(o_t[r], "bfloat16")
            if block * TM + t < stored:
                token.store_rows(state, states, (row, block * TM + t, h), v0 + i0, col, rows, chunks, c.lanes)
    T.pdl_trigger()  # earlier, CTAs of the next launch would take room among those of this one
    if c.commit and length > 0:
        token.store_rows(state, pool, (slot, h), v0 + i0, col, rows, chunks, c.lanes)


@T.macro
def _stage(c, q, k, v, gates, K_s, Q_s, V_s, coef_s, t0, L, scale, h, v0, tx):
    """k_n, q_n, v and the coefficients of L tokens from t0 on into shared memory."""
    hk = h // (c.HV // c.H)
    at_once = c.threads // STAGING_LANES
    raw_k = T.alloc_local((TM // at_once, CHUNK), "bfloat16")
    raw_q = T.alloc_local((TM // at_once, CHUNK), "bfloat16")
    key = T.alloc_local((1, CHUNK), "float32")
    query = T.alloc_local((1, CHUNK), "float32")
    kq = T.alloc_local((1,), "float32")
    part = tx % STAGING_LANES
    for p in T.unroll(TM // at_once):
        t = p * at_once + tx // STAGING_LANES
        for e in T.vectorized(CHUNK):
            raw_k[p, e] = T.if_then_else(t < L, k[t0 + t, hk, part * CHUNK + e], T.bfloat16(0))
        for e in T.vectorized(CHUNK):
            raw_q[p, e] = T.if_then_else(t < L, q[t0 + t, hk, part * CHUNK + e], T.bfloat16(0))
    for i in T.unroll(T.ceildiv(TM * c.BV // CHUNK, c.threads)):
        t = (i * c.threads + tx) // (c.BV // CHUNK)
        if t < L:
            for e in T.vectorized(CHUNK):
                V_s[t, (i * c.threads + tx) % (c.BV // CHUNK) * CHUNK + e] = v[
                    t0 + t, h, v0 + (i * c.threads + tx) % (c.BV // CHUNK) * CHUNK + e
                ]
    if tx < L:
        _gates(c, gates, coef_s, t0, h, tx)
    for p in T.unroll(TM // at_once):
        t = p * at_once + tx // STAGING_LANES
        if p * at_once < L:
            for e in T.vectorized(CHUNK):
                key[0, e] = T.cast(raw_k[p, e], "float32")
            for e in T.vectorized(CHUNK):
                query[0, e] = T.cast(raw_q[p, e], "float32")
            token.normalise(key, query, kq, scale, c.l2norm, 1, STAGING_LANES)
            for half in T.unroll(2):
                for e in T.vectorized(CHUNK // 2):
                    K_s[t, part * CHUNK + half * (CHUNK // 2) + e] = key[0, half * (CHUNK // 2) + e]
                for e in T.vectorized(CHUNK // 2):
                    Q_s[t, part * CHUNK + half * (CHUNK // 2) + e] = query[0, half * (CHUNK // 2) + e]
            if part == 0:
                coef_s[t, KQ] = kq[0]


@T.macro
def _gates(c, gates, coef_s, t0, h, t):
    if c.raw_gates:
        a, b, A_log, dt_bias, beta_scale = gates
        token.raw_gates(A_log[h], a[t0 + t, h], dt_bias[h], b[t0 + t, h], beta_scale, coef_s, t, DECAY, BETA)
    else:
        g, beta = gates
        coef_s[t, DECAY] = T.exp(g[t0 + t, h])
        coef_s[t, BETA] = beta[t0 + t, h]
