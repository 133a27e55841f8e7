"""The steps that GDN programs share, named after the equations in specs/design/chunk-form.md.

Every step is a TileLang macro: it is inlined where it is called and works on the caller's buffers. `TM` = 16 is the
number of token rows of a block. Rows `t >= L` of a block are staged as zeros with g = beta = 0, so they change nothing.
Lanes are (g, c) = (lane // 4, lane % 4), as in kernels/warp.py.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.tile import TM
from kernels.warp import CHUNK, QUAD, mma, rows_fragment

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
        T.access_ptr(dst[row, dst_col], "w", CHUNK), T.access_ptr(src[t, head, col], "r", CHUNK), CHUNK, predicate=present
    )


@T.macro
def stage_tokens(x, dst, row0, t0, head, L, K: int, threads: int, tx):
    """dst[row0 + t, 0:K] = x[t0 + t, head, :] for t < L, else 0."""
    for i in T.unroll(TM * K // CHUNK // threads):
        t = (i * threads + tx) // (K // CHUNK)
        col = (i * threads + tx) % (K // CHUNK) * CHUNK
        stage_chunk(x, t0 + t, head, col, dst, row0 + t, col, t < L)


@T.macro
def raw_gates(a, b, A_log, dt_bias, beta_scale, decay, beta, j, i, t, head, present):
    """decay[j, i] = e^{g_t} and beta[j, i] from the raw gates of token t; 1 and 0 where it is not `present`.

    g_t = -exp(A_log) softplus(a_t + dt_bias), beta_t = beta_scale sigmoid(b_t)
    """
    if present:
        x = T.cast(a[t, head], "float32") + T.cast(dt_bias[head], "float32")
        decay[j, i] = T.exp(log_decay(A_log[head], x))
        beta[j, i] = beta_scale * T.sigmoid(T.cast(b[t, head], "float32"))
    else:
        decay[j, i] = 1.0
        beta[j, i] = 0.0


def log_decay(a_log, x):
    """-exp(a_log) softplus(x). One exponential where softplus(x) = exp(x), so that inf never meets 0."""
    softplus = T.if_then_else(x > SOFTPLUS_THRESHOLD, x, T.log1p(T.exp(x)))
    return -T.if_then_else(x < SOFTPLUS_EXP_BELOW, T.exp(a_log + x), T.exp(a_log) * softplus)


@T.macro
def activated_gates(g, beta_in, decay, beta, j, i, t, head, present):
    """decay[j, i] = e^{g_t} and beta[j, i] = beta_t as given; 1 and 0 where token t is not `present`."""
    if present:
        decay[j, i] = T.exp(g[t, head])
        beta[j, i] = beta_in[t, head]
    else:
        decay[j, i] = 1.0
        beta[j, i] = 0.0


@T.macro
def products(KQ_s, S_parts, parts: int, Y_k, Y_q, role, same_0, same_1, K: int, g, c):
    """The products of this block, raw bf16 operands and fp32 sums, in `mma` fragments.

    Y_k, Y_q = K S^T, Q S^T for the 8 state rows of this warp, whose exact bf16 parts are S_parts[part * K / 4 :]
    same     = K K^T (role 0), Q K^T (role 1) or Q Q^T (role 2), tokens 0-7 and 8-15 of the second factor
    """
    k_low, k_high = T.alloc_local((CHUNK,), "bfloat16"), T.alloc_local((CHUNK,), "bfloat16")
    q_low, q_high = T.alloc_local((CHUNK,), "bfloat16"), T.alloc_local((CHUNK,), "bfloat16")
    A_k, A_q = T.alloc_local((2 * CHUNK,), "bfloat16"), T.alloc_local((2 * CHUNK,), "bfloat16")
    for j in T.unroll(K // QUAD):
        for e in T.vectorized(CHUNK):
            k_low[e] = KQ_s[g, j * QUAD + c * CHUNK + e]
        for e in T.vectorized(CHUNK):
            k_high[e] = KQ_s[g + 8, j * QUAD + c * CHUNK + e]
        for e in T.vectorized(CHUNK):
            q_low[e] = KQ_s[TM + g, j * QUAD + c * CHUNK + e]
        for e in T.vectorized(CHUNK):
            q_high[e] = KQ_s[TM + g + 8, j * QUAD + c * CHUNK + e]
        rows_fragment(k_low, k_high, A_k)
        rows_fragment(q_low, q_high, A_q)
        for half in T.unroll(2):
            for part in T.unroll(parts):
                mma(A_k, half * 8, S_parts, part * (K // 4) + j * CHUNK + half * 4, Y_k)
                mma(A_q, half * 8, S_parts, part * (K // 4) + j * CHUNK + half * 4, Y_q)
            if role == 0:
                mma(A_k, half * 8, k_low, half * 4, same_0)
                mma(A_k, half * 8, k_high, half * 4, same_1)
            if role == 1:
                mma(A_q, half * 8, k_low, half * 4, same_0)
                mma(A_q, half * 8, k_high, half * 4, same_1)
            if role == 2:
                mma(A_q, half * 8, q_low, half * 4, same_0)
                mma(A_q, half * 8, q_high, half * 4, same_1)


@T.macro
def share_gram(role, same_0, same_1, kk, qk, k_norm, q_norm, scale, l2norm: bool, g, c):
    """What the solve needs of the token products, from the warps that hold them to all.

    kk[i, t] = k_i . k_t and qk[i, c * 4 + m] = q_t . k_i with t = 4 m + c: row i is read in step i of the solve
    k_norm[t] = 1 / |k_t|, q_norm[t] = scale / |q_t|, from the diagonals
    """
    for half in T.unroll(2):
        for e in T.unroll(2):
            t = g + half * 8
            i = c * 2 + e
            if role == 0:
                kk[t, i] = same_0[half * 2 + e]
                kk[t, i + 8] = same_1[half * 2 + e]
                if t == i:
                    k_norm[t] = inverse_norm(same_0[half * 2 + e], 1.0, l2norm)
                if t == i + 8:
                    k_norm[t] = inverse_norm(same_1[half * 2 + e], 1.0, l2norm)
            if role == 1:
                qk[i, t % 4 * 4 + t // 4] = same_0[half * 2 + e]
                qk[i + 8, t % 4 * 4 + t // 4] = same_1[half * 2 + e]
            if role == 2:
                if t == i:
                    q_norm[t] = inverse_norm(same_0[half * 2 + e], scale, l2norm)
                if t == i + 8:
                    q_norm[t] = inverse_norm(same_1[half * 2 + e], scale, l2norm)


def inverse_norm(square, scale, l2norm: bool):
    """scale / sqrt(square + eps), or scale."""
    return T.rsqrt(square + L2NORM_EPS) * scale if l2norm else scale


@T.macro
def share_rows(Y_k, Y_q, Y, warp, g, c):
    """Y[warp, r, t] = k_t . s_r, Y[warp, r, 16 + c * 4 + m] = q_t . s_r with t = 4 m + c, for the warp's rows s_r."""
    for half in T.unroll(2):
        for e in T.unroll(2):
            t = g + half * 8
            Y[warp, c * 2 + e, t] = Y_k[half * 2 + e]
            Y[warp, c * 2 + e, TM + t % 4 * 4 + t // 4] = Y_q[half * 2 + e]


@T.macro
def solve_row(Y, V_s, kk, qk, k_norm, q_norm, decay, beta, head, w, o_t, tokens: int, warp, g, c):
    """The recurrence on the readouts of one state row, `tokens` steps; four lanes share a row and its steps.

        R_t, Q_t = S_{i-1} k_t, S_{i-1} q_t of all later tokens t, raw, before step i
        u_i = beta_i (v_i - e^{g_i} |k_i|^-1 R_i);  w_i = u_i / |k_i|        (S_i = e^{g_i} S_{i-1} + w_i k_i^T)
        R_t = e^{g_i} R_t + w_i (k_i . k_t);  Q_t = e^{g_i} Q_t + w_i (k_i . q_t)

    Lane c keeps Q of the tokens t = 4 m + c and leaves o_t[m] = scale Q_t / |q_t|. Decays are multiplied up step by
    step, so that a token that forgets everything costs no precision; token t reads nothing of later tokens.
    """
    R, Q = T.alloc_local((TM,), "float32"), T.alloc_local((4,), "float32")
    a, b = T.alloc_local((TM,), "float32"), T.alloc_local((4,), "float32")
    wi = T.alloc_var("float32")
    for m in T.unroll(tokens // 4):
        for e in T.vectorized(4):
            R[m * 4 + e] = Y[warp, g, m * 4 + e]
    for e in T.vectorized(4):
        Q[e] = Y[warp, g, TM + c * 4 + e]
    for i in T.unroll(tokens):
        for m in T.unroll(tokens // 4):
            if m >= i // 4:
                for e in T.vectorized(4):
                    a[m * 4 + e] = kk[i, m * 4 + e]
        for e in T.vectorized(4):
            b[e] = qk[i, c * 4 + e]
        d = decay[head, i]
        wi = beta[head, i] * (T.cast(V_s[i, warp * 8 + g], "float32") - d * (k_norm[i] * R[i])) * k_norm[i]
        for t in T.unroll(tokens):
            if t > i:
                R[t] = d * R[t] + wi * a[t]
        for m in T.unroll(tokens // 4):
            if m > i // 4:
                Q[m] = d * Q[m] + wi * b[m]
            if m == i // 4:
                Q[m] = T.if_then_else(c >= i % 4, d * Q[m] + wi * b[m], Q[m])
        if c == 0:
            w[warp, i, g % 2 * 4 + g // 2] = wi
    for m in T.unroll(tokens // 4):
        o_t[m] = Q[m] * q_norm[m * 4 + c]


def bf16_part(x, part: int):
    """The `part`-th exact bf16 part of an fp32 value: x = part 0 + part 1 + part 2."""
    high = T.cast(x, "bfloat16")
    if part == 0:
        return high
    return bf16_part(x - T.cast(high, "float32"), part - 1)
