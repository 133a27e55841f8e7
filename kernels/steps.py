"""The steps that GDN programs share, named after the equations in specs/design/chunk-form.md.

Every step is a TileLang macro: it is inlined where it is called and works on the caller's buffers. `TM` = 16 is the
number of token rows of a block. Rows `t >= L` of a block are staged as zeros with g = beta = 0, so they change nothing.
Lanes are (g, c) = (lane // 4, lane % 4), as in kernels/warp.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.tile import TM, each
from kernels.warp import CHUNK, QUAD, load_chunk, mma, rows_fragment

SOFTPLUS_THRESHOLD = 20.0
SOFTPLUS_EXP_BELOW = -16.0  # below it log1p(exp(x)) equals exp(x) to fp32
L2NORM_EPS = 1e-6


@T.macro
def assume_wide(x, dims: int):
    """Tell the compiler what the API has checked: the first `dims` (1 or 2) strides of x allow 16-byte accesses."""
    T.assume(x.strides[0] % 8 == 0)
    if dims == 2:
        T.assume(x.strides[1] % 8 == 0)


@T.macro
def stage_chunk(src, t, head, col, dst, row, dst_col, present):
    """dst[row, dst_col:] = src[t, head, col:], 8 bf16 values by cp.async, or zeros where not `present`."""
    T.ptx_cp_async(
        T.access_ptr(dst[row, dst_col], "w", CHUNK),
        T.access_ptr(src[t, head, col], "r", CHUNK),
        CHUNK,
        predicate=present,
    )


@T.macro
def stage_tokens(x, dst, row0, t0, head, L, K: int, threads: int, tx):
    """dst[row0 + t, 0:K] = x[t0 + t, head, :] for t < L, else 0."""
    for i in T.unroll(TM * K // CHUNK // threads):
        t = (i * threads + tx) // (K // CHUNK)
        col = (i * threads + tx) % (K // CHUNK) * CHUNK
        stage_chunk(x, t0 + t, head, col, dst, row0 + t, col, t < L)


@T.macro
def load_raw_gates(a, b, A_log, dt_bias, beta_scale, x, y, z, t, head):
    """x = a_t, b_t; y = A_log; z = dt_bias of a head: all loads in flight, none waited for."""
    y[0] = A_log[head]
    z[0] = dt_bias[head]
    x[0] = a[t, head]
    x[1] = b[t, head]


@T.macro
def load_activated_gates(g, beta, x, y, z, t, head):
    """x = g_t, beta_t."""
    x[0] = g[t, head]
    x[1] = beta[t, head]


def log_decay(a_log, x):
    """-exp(a_log) softplus(x). One exponential where softplus(x) = exp(x), so that inf never meets 0."""
    softplus = T.Select(x > SOFTPLUS_THRESHOLD, x, T.log1p(T.exp(x)))
    return -T.Select(x < SOFTPLUS_EXP_BELOW, T.exp(a_log + x), T.exp(a_log) * softplus)


@T.macro
def share_gates(gates, x, y, z, raw: bool, decay, beta, j, t, present):
    """decay[j, t] = e^{g_t} and beta[j, t] from what was loaded; 1 and 0 where token t is not `present`.

    Raw gates: g_t = -exp(A_log) softplus(a_t + dt_bias), beta_t = beta_scale sigmoid(b_t)
    """
    if present:
        if raw:
            decay[j, t] = T.exp(log_decay(y[0], T.cast(x[0], "float32") + T.cast(z[0], "float32")))
            beta[j, t] = gates[4] * T.sigmoid(T.cast(x[1], "float32"))
        else:
            decay[j, t] = T.exp(x[0])
            beta[j, t] = x[1]
    else:
        decay[j, t] = 1.0
        beta[j, t] = 0.0


def slot(t):
    """Where a row of 16 keeps token t, so that the four tokens t = 4 m + c of lane c are neighbours."""
    return t % 4 * 4 + t // 4


@T.macro
def share_readouts(KQ_s, state, pitch: int, parts: int, Y, row0, tiles: int, K: int, g, c):
    """Y[row, t] = k_t . s and Y[row, 16 + slot(t)] = q_t . s for 8 state rows s from row0 and 8 `tiles` tokens.

    Raw operands and fp32 sums: a state element is the sum of `parts` bf16 values, multiplied one after the other.
    state[row * pitch :] are the rows of the state in shared memory. What a warp does for its own rows alone.
    """
    s = T.alloc_local((CHUNK,), state.dtype)
    s_part, k, q = (T.alloc_local((CHUNK,), "bfloat16") for _ in each(3))
    A = T.alloc_local((tiles * 2 * CHUNK,), "bfloat16")  # of a tile: row g is k_g, row g + 8 is q_g
    sums = T.alloc_local((2 * tiles * 4,), "float32")  # two chains a tile halve the latency
    T.clear(sums)
    for j in T.unroll(K // QUAD):
        for e in T.vectorized(CHUNK):
            s[e] = state[(row0 + g) * pitch + j * QUAD + c * CHUNK + e]
        for tile in each(tiles):
            load_chunk(KQ_s, tile * 8 + g, j, c, k)
            load_chunk(KQ_s, TM + tile * 8 + g, j, c, q)
            rows_fragment(k, q, A, tile * 2 * CHUNK)
        for part in each(parts):
            for e in T.unroll(CHUNK):
                s_part[e] = bf16_part(s[e], part)
            for tile in T.unroll(tiles):
                for half in T.unroll(2):
                    mma(A, (tile * 2 + half) * CHUNK, s_part, half * 4, sums, tile * 8 + half * 4)
    for tile in T.unroll(tiles):
        t = tile * 8 + g
        for e in T.unroll(2):
            Y[row0 + c * 2 + e, t] = sums[tile * 8 + e] + sums[tile * 8 + 4 + e]
            Y[row0 + c * 2 + e, TM + slot(t)] = sums[tile * 8 + 2 + e] + sums[tile * 8 + 6 + e]


@T.macro
def share_token_products(KQ_s, kk, qk, k_norm, q_norm, scale, l2norm: bool, given: bool, late: bool, K: int, g, c):
    """What the solve needs of the tokens alone, for tokens 0 to 7, or for `late` 8 to 15 with all before them.

    kk[i, t] = k_i . k_t and qk[i, slot(t)] = k_i . q_t for i <= t, raw: row i is read in step i of the solve
    k_norm[t] = 1 / |k_t|, q_norm[t] = scale / |q_t|, from the diagonals, unless they are `given`
    """
    t0 = TM // 2 if late else 0
    k, q, k_early = (T.alloc_local((CHUNK,), "bfloat16") for _ in each(3))
    A = T.alloc_local((2 * CHUNK,), "bfloat16")
    by_k, by_q, by_early = (T.alloc_local((8,), "float32") for _ in each(3))  # two chains; rows g: k_t, g + 8: q_t
    T.clear(by_k)
    T.clear(by_q)
    T.clear(by_early)
    for j in T.unroll(K // QUAD):
        load_chunk(KQ_s, t0 + g, j, c, k)
        load_chunk(KQ_s, TM + t0 + g, j, c, q)
        rows_fragment(k, q, A)
        if late:
            load_chunk(KQ_s, g, j, c, k_early)
        for half in T.unroll(2):
            mma(A, half * CHUNK, k, half * 4, by_k, half * 4)
            mma(A, half * CHUNK, q, half * 4, by_q, half * 4)
            if late:
                mma(A, half * CHUNK, k_early, half * 4, by_early, half * 4)
    for i in T.unroll(4):
        by_k[i] = by_k[i] + by_k[4 + i]
        by_q[i] = by_q[i] + by_q[4 + i]
        by_early[i] = by_early[i] + by_early[4 + i]
    for e in T.unroll(2):
        kk[t0 + c * 2 + e, t0 + g] = by_k[e]
        qk[t0 + c * 2 + e, slot(t0 + g)] = by_k[2 + e]
        if late:
            kk[c * 2 + e, t0 + g] = by_early[e]
            qk[c * 2 + e, slot(t0 + g)] = by_early[2 + e]
    if not given and c == g // 2:  # this lane has the diagonal's entries of token g
        k_norm[t0 + g] = inverse_norm(T.Select(g % 2 == 0, by_k[0], by_k[1]), 1.0, l2norm)
        q_norm[t0 + g] = inverse_norm(T.Select(g % 2 == 0, by_q[2], by_q[3]), scale, l2norm)


@T.macro
def load_given_norms(q_inv_norm, k_inv_norm, x, t0, head, L, lane):
    """x = 1 / |k_t| in lane t, 1 / |q_t| in lane 16 + t, for t < L."""
    t = lane % TM
    x[0] = 0.0
    if t < L:
        x[0] = T.if_then_else(lane < TM, k_inv_norm[t0 + t, head], q_inv_norm[t0 + t, head])


@T.macro
def share_given_norms(x, k_norm, q_norm, scale, lane):
    """k_norm[t] = 1 / |k_t|, q_norm[t] = scale / |q_t| from what was loaded."""
    if lane < TM:
        k_norm[lane] = x[0]
    else:
        q_norm[lane - TM] = x[0] * scale


def inverse_norm(square, scale, l2norm: bool):
    """scale / sqrt(square + eps), or scale."""
    return T.rsqrt(square + L2NORM_EPS) * scale if l2norm else scale


@T.macro
def load_readouts(Y, R, Q, tokens: int, warp, g, c):
    """R[t] = k_t . s for all tokens and Q[m] = q_t . s for t = 4 m + c, for the state row s of this lane."""
    for m in T.unroll(tokens // 4):
        for e in T.vectorized(4):
            R[m * 4 + e] = Y[warp * 8 + g, m * 4 + e]
    for e in T.vectorized(4):
        Q[e] = Y[warp * 8 + g, TM + c * 4 + e]


@T.macro
def solve_steps(R, Q, V_s, kk, qk, k_norm, q_norm, decay, beta, head, w, o, first: int, tokens: int, warp, g, c):
    """Four steps, from token `first`, of the recurrence on the readouts of one state row; four lanes share a row.

        R_t, Q_t = S_{i-1} k_t, S_{i-1} q_t of all later tokens t < `tokens`, raw, before step i
        u_i = beta_i (v_i - e^{g_i} |k_i|^-1 R_i);  w_i = u_i / |k_i|        (S_i = e^{g_i} S_{i-1} + w_i k_i^T)
        R_t = e^{g_i} R_t + w_i (k_i . k_t);  Q_t = e^{g_i} Q_t + w_i (k_i . q_t)

    Leaves w[warp, i, .] = w_i and o[warp, t, g] = scale Q_t / |q_t|. Decays are multiplied up step by step, so that a
    token that forgets everything costs no precision; a token reads nothing of later tokens.
    """
    a, b = T.alloc_local((TM,), "float32"), T.alloc_local((4,), "float32")
    w_i = T.alloc_local((4,), "float32")
    for step in T.unroll(4):
        i = first + step
        for m in T.unroll(first // 4, tokens // 4):
            for e in T.vectorized(4):
                a[m * 4 + e] = kk[i, m * 4 + e]
        for e in T.vectorized(4):
            b[e] = qk[i, c * 4 + e]
        d = decay[head, i]
        w_i[step] = beta[head, i] * (T.cast(V_s[i, warp * 8 + g], "float32") - d * (k_norm[i] * R[i])) * k_norm[i]
        for t in T.unroll(first, tokens):
            if t > i:
                R[t] = d * R[t] + w_i[step] * a[t]
        for m in T.unroll(first // 4 + 1, tokens // 4):
            Q[m] = d * Q[m] + w_i[step] * b[m]
        Q[first // 4] = T.Select(c >= step, d * Q[first // 4] + w_i[step] * b[first // 4], Q[first // 4])
    o[warp, first + c, g] = T.cast(Q[first // 4] * q_norm[first + c], "bfloat16")
    if c == 0:  # no store before the last load, which it might hold back
        for step in T.unroll(4):
            w[warp, first + step, g % 2 * 4 + g // 2] = w_i[step]


def bf16_part(x, part: int):
    """The `part`-th exact bf16 part: an fp32 value is the sum of three of them, fp16 of two, bf16 is one."""
    high = T.cast(x, "bfloat16")
    if part == 0:
        return high
    return bf16_part(T.cast(x, "float32") - T.cast(high, "float32"), part - 1)
