"""The steps that GDN programs share, named after the equations in specs/design/chunk-form.md.

Every step is a TileLang macro: it is inlined where it is called and works on the caller's buffers. `TM` = 16 is the
number of token rows of a block. Rows `t >= L` of a block are staged as zeros with g = beta = 0, so they change nothing.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.tile import TM

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
def stage_rows(src, dst, row0, t0, head, col0, L):
    """dst[row0 + t, :] = src[t0 + t, head, col0:] for t < L, else 0."""
    for t, j in T.Parallel(TM, dst.shape[1]):
        dst[row0 + t, j] = T.if_then_else(t < L, src[t0 + t, head, col0 + j], T.cast(0, dst.dtype))


@T.macro
def raw_gates(a, b, A_log, dt_bias, beta_scale, g_s, beta_s, t0, head, L, tx):
    """g_t = -exp(A_log) softplus(a_t + dt_bias), beta_t = beta_scale sigmoid(b_t): thread t owns token t."""
    if tx < TM:
        if tx < L:
            x = T.cast(a[t0 + tx, head], "float32") + T.cast(dt_bias[head], "float32")
            g_s[tx] = log_decay(A_log[head], x)
            beta_s[tx] = beta_scale * T.sigmoid(T.cast(b[t0 + tx, head], "float32"))
        else:
            g_s[tx] = 0.0
            beta_s[tx] = 0.0


def log_decay(a_log, x):
    """-exp(a_log) softplus(x). One exponential where softplus(x) = exp(x), so that inf never meets 0."""
    softplus = T.if_then_else(x > SOFTPLUS_THRESHOLD, x, T.log1p(T.exp(x)))
    return -T.if_then_else(x < SOFTPLUS_EXP_BELOW, T.exp(a_log + x), T.exp(a_log) * softplus)


@T.macro
def activated_gates(g, beta, g_s, beta_s, t0, head, L, tx):
    """g and beta as given."""
    if tx < TM:
        if tx < L:
            g_s[tx] = g[t0 + tx, head]
            beta_s[tx] = beta[t0 + tx, head]
        else:
            g_s[tx] = 0.0
            beta_s[tx] = 0.0


@T.macro
def norms_and_decays(gram, g_s, inv_norm, decay, decay_from_start, scale, l2norm: bool, tx):
    """inv_norm of the k rows and q rows (q carries `scale`); exp(g_t); exp(g_1 + ... + g_t)."""
    if tx < TM:
        if l2norm:
            inv_norm[tx] = T.rsqrt(gram[tx, tx] + L2NORM_EPS)
            inv_norm[TM + tx] = T.rsqrt(gram[TM + tx, TM + tx] + L2NORM_EPS) * scale
        else:
            inv_norm[tx] = 1.0
            inv_norm[TM + tx] = scale
        total = T.alloc_var("float32")
        total = 0.0
        for i in T.unroll(TM):
            total += T.if_then_else(i <= tx, g_s[i], 0.0)
        decay[tx] = T.exp(g_s[tx])
        decay_from_start[tx] = T.exp(total)


@T.macro
def block_coefficients(gram, g_s, inv_norm, coef, tx, threads: int):
    """coef[t, i] = D_ti k_t . k_i and coef[TM + t, i] = scale D_ti q_t . k_i, normalised, D_ti = e^{g_{i+1} + .. + g_t}

    The sum of the segment itself, never a difference of two cumulative sums: exact under strong decay. Only i <= t is
    meaningful; the rest is never read.
    """
    for r in T.unroll(TM * TM // threads):
        t = (r * threads + tx) // TM
        i = (r * threads + tx) % TM
        total = T.alloc_var("float32")
        total = 0.0
        for m in T.unroll(1, TM):
            total += T.if_then_else((m > i) and (m <= t), g_s[m], 0.0)
        d = T.alloc_var("float32")
        d = T.exp(total) * inv_norm[i]
        coef[t, i] = d * inv_norm[t] * gram[t, i]
        coef[TM + t, i] = d * inv_norm[TM + t] * gram[TM + t, i]


@T.macro
def split_part(S, S_s, part):
    """S_s = the `part`-th bf16 part of S: S = part 0 + part 1 + part 2 exactly for an fp32 state."""
    for i, j in T.Parallel(S.shape[0], S.shape[1]):
        hi = T.cast(S[i, j], "bfloat16")
        rest = S[i, j] - T.cast(hi, "float32")
        mid = T.cast(rest, "bfloat16")
        low = T.cast(rest - T.cast(mid, "float32"), "bfloat16")
        S_s[i, j] = T.if_then_else(part == 0, hi, T.if_then_else(part == 1, mid, low))


@T.macro
def solve_row(Y_s, V_s, U_s, coef, beta, from_start, inv_norm, u, o, t0, h, v0, L, BV: int, threads: int, tx):
    """The unit-lower-triangular solve for u and the outputs, one V row per thread.

    u_t = beta_t (v_t - e^{G_t} Y_k[:, t] - sum_{i<t} D_ti A_ti u_i)
    o_t = e^{G_t} Y_q[:, t] + sum_{i<=t} D_ti B_ti u_i
    """
    row = tx % BV
    share = tx // BV
    acc = T.alloc_var("float32")
    for t in T.unroll(TM):
        acc = T.cast(V_s[t, row], "float32") - from_start[t] * inv_norm[t] * Y_s[row, t]
        for i in T.unroll(t):
            acc -= coef[t, i] * u[i]
        u[t] = beta[t] * acc
    if share == 0:
        for t in T.unroll(TM):
            U_s[t, row] = u[t]
    for t in T.unroll(TM):
        if t % (threads // BV) == share and t < L:
            acc = from_start[t] * inv_norm[TM + t] * Y_s[row, TM + t]
            for i in T.unroll(t + 1):
                acc += coef[TM + t, i] * u[i]
            o[t0 + t, h, v0 + row] = T.cast(acc, "bfloat16")


@T.macro
def zero_tail(o, end, n, N, h, v0, BV: int):
    """Rows of o that belong to no request are zero: request n clears every N-th of them."""
    for r in T.serial(T.max(T.ceildiv(o.shape[0] - end - n, N), 0)):
        for i in T.Parallel(BV):
            o[end + n + r * N, h, v0 + i] = T.bfloat16(0)
