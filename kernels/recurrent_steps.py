"""One token of the gated delta rule with every rounding fixed: the arithmetic that decode and lossless verify share.

Programs that must agree bit for bit (T tokens in one call, or T calls of one token each) are built from these steps.
What a step computes does not depend on which thread does it, so two programs may spread the work differently:

- A dot product over K columns, also the square of a norm, is made of chunks of 8 contiguous columns. A chunk is one
  product and a chain of fused multiply-adds in the order of the columns. The K / 8 chunk sums are added as a balanced
  tree: chunk i with chunk i xor 8, then 4, 2, 1. Addition commutes, so every lane of a butterfly has the same bits.
- k_n = k r(k), q_n = q (r(q) scale), r(x) = rsqrt(x . x + 1e-6); without the norm k_n = k, q_n = q scale.
- Both products of a token read the old state, so a token costs one round of reductions:

      d  = exp(g)
      u  = beta fma(-d, S k_n, v)
      o  = fma(u, k_n . q_n, d (S q_n))
      S' = fma(u, k_n, d S)

- S is the state *as stored*: S' is rounded to the pool's dtype after every token, and the next token reads that.

Every product and sum here is one IEEE operation that a compiler may not contract with a neighbour. In the gates, whose
functions are shared with other programs, no product meets a sum that it could be contracted with: exp, whose last
step is an exact product with a power of two, has the same bits either way.

A row of the state lies in `lanes` (4, 8 or 16) neighbouring lanes; lane c of them holds the chunks c, c + lanes, ...
A lane holds that part of several rows: local arrays are [rows, chunks, 8].
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.steps import L2NORM_EPS, log_decay

CHUNK = 8  # contiguous columns that one lane sums, and reads or writes as 16-byte vectors


def halvings(n: int) -> tuple[int, ...]:
    """n / 2, n / 4, ..., 1."""
    return tuple(n >> i for i in range(1, n.bit_length()))


@T.macro
def dot_chunks(S, x, total, at: int, rows: int, chunks: int):
    """total[at + r] = this lane's part of S[r, :] . x. S: [rows, chunks, 8]; x: [chunks, 8]; fp32."""
    part = T.alloc_local((rows, chunks), "float32")
    for r in T.unroll(rows):
        for j in T.unroll(chunks):
            part[r, j] = T.ieee_mul(S[r, j, 0], x[j, 0])
            for e in T.unroll(1, CHUNK):
                part[r, j] = T.ieee_fmaf(S[r, j, e], x[j, e], part[r, j])
    for half in halvings(chunks):
        for r in T.unroll(rows):
            for j in T.unroll(half):
                part[r, j] = T.ieee_add(part[r, j], part[r, j + half])
    for r in T.unroll(rows):
        total[at + r] = part[r, 0]


@T.macro
def sum_lanes(x, count: int, lanes: int):
    """x[0:count] = the sums over `lanes` neighbouring lanes, the same bits in each of them."""
    for distance in halvings(lanes):
        for i in T.unroll(count):
            x[i] = T.ieee_add(x[i], T.shfl_xor(x[i], distance))


@T.macro
def load_vector(x_s, t, c, x, chunks: int, lanes: int):
    """x = the chunks of this lane of row t of x_s (fp32 in shared memory)."""
    for j in T.unroll(chunks):
        for half in T.unroll(2):
            for e in T.vectorized(CHUNK // 2):
                x[j, half * (CHUNK // 2) + e] = x_s[t, (j * lanes + c) * CHUNK + half * (CHUNK // 2) + e]


@T.macro
def widen(state, S, rows: int, chunks: int):
    """S = state in fp32, exactly. Of two packed bf16 values each is one operation away from its fp32 bits."""
    if state.dtype == "bfloat16":
        pairs = T.view(state, (rows, chunks, CHUNK // 2), "uint32")
        for r in T.unroll(rows):
            for j in T.unroll(chunks):
                for e in T.unroll(CHUNK // 2):
                    S[r, j, 2 * e] = T.reinterpret(pairs[r, j, e] << 16, "float32")
                    S[r, j, 2 * e + 1] = T.reinterpret(pairs[r, j, e] & T.uint32(0xFFFF0000), "float32")
    else:
        for r in T.unroll(rows):
            for j in T.unroll(chunks):
                for e in T.vectorized(CHUNK):
                    S[r, j, e] = T.cast(state[r, j, e], "float32")


@T.macro
def advance(S, key, query, v, decay, beta, kq, o, rows: int, chunks: int, lanes: int):
    """One token: the fp32 state S becomes the next state, not rounded; o[r] (fp32) is the output of row r.

    key, query: k_n, q_n, [chunks, 8]; v[r]: of the rows of this lane; decay = exp(g); kq = k_n . q_n.
    """
    products = T.alloc_local((2 * rows,), "float32")  # S k_n of the rows, then S q_n
    u = T.alloc_local((rows,), "float32")
    dot_chunks(S, key, products, 0, rows, chunks)
    dot_chunks(S, query, products, rows, rows, chunks)
    sum_lanes(products, 2 * rows, lanes)
    for r in T.unroll(rows):
        u[r] = T.ieee_mul(beta, T.ieee_fmaf(-decay, products[r], v[r]))
        o[r] = T.ieee_fmaf(u[r], kq, T.ieee_mul(decay, products[rows + r]))
        for j in T.unroll(chunks):
            for e in T.unroll(CHUNK):
                S[r, j, e] = T.ieee_fmaf(u[r], key[j, e], T.ieee_mul(decay, S[r, j, e]))


@T.macro
def narrow(S, state, rows: int, chunks: int):
    """state = S, rounded to the pool's dtype."""
    for r in T.unroll(rows):
        for j in T.unroll(chunks):
            for e in T.vectorized(CHUNK):
                state[r, j, e] = T.cast(S[r, j, e], state.dtype)


@T.macro
def load_rows(x, index, row, col, state, rows: int, chunks: int, lanes: int):
    """state = this lane's part of x[index], a state [V, K]: from row `row` on every (32 / lanes)-th."""
    for r in T.unroll(rows):
        for j in T.unroll(chunks):
            for e in T.vectorized(CHUNK):
                state[r, j, e] = x[(*index, row + r * (32 // lanes), (j * lanes + col) * CHUNK + e)]


@T.macro
def store_rows(state, x, index, row, col, rows: int, chunks: int, lanes: int):
    """x[index] = state; the inverse of `load_rows`."""
    for r in T.unroll(rows):
        for j in T.unroll(chunks):
            for e in T.vectorized(CHUNK):
                x[(*index, row + r * (32 // lanes), (j * lanes + col) * CHUNK + e)] = state[r, j, e]


@T.macro
def normalise(key, query, kq, scale, l2norm: bool, chunks: int, lanes: int):
    """Raw k and q of one token, [chunks, 8] in fp32, become k_n and q_n; kq[0] = k_n . q_n."""
    factor = T.alloc_local((2,), "float32")  # of k, then of q
    if l2norm:
        dot_chunks(as_row(key), key, factor, 0, 1, chunks)
        dot_chunks(as_row(query), query, factor, 1, 1, chunks)
        sum_lanes(factor, 2, lanes)
        factor[0] = T.rsqrt(T.ieee_add(factor[0], L2NORM_EPS))
        factor[1] = T.ieee_mul(T.rsqrt(T.ieee_add(factor[1], L2NORM_EPS)), scale)
    else:
        factor[0] = 1.0
        factor[1] = scale
    for j in T.unroll(chunks):
        for e in T.unroll(CHUNK):
            key[j, e] = T.ieee_mul(key[j, e], factor[0])
            query[j, e] = T.ieee_mul(query[j, e], factor[1])
    dot_chunks(as_row(key), query, kq, 0, 1, chunks)
    sum_lanes(kq, 1, lanes)


def as_row(x):
    """A local [chunks, 8] array as [1, chunks, 8]."""
    return T.view(x, (1, *x.shape))


@T.macro
def raw_gates(a_log, a, dt_bias, b, beta_scale, coef, t, decay: int, beta: int):
    """coef[t, decay] = exp(g), g = -exp(a_log) softplus(a + dt_bias); coef[t, beta] = beta_scale sigmoid(b)."""
    rate = T.alloc_var("float32")  # values that branches read are loaded once, before them
    x = T.alloc_var("float32")
    y = T.alloc_var("float32")
    rate = a_log
    x = T.ieee_add(T.cast(a, "float32"), T.cast(dt_bias, "float32"))
    y = T.cast(b, "float32")
    coef[t, decay] = T.exp(log_decay(rate, x))
    coef[t, beta] = T.ieee_mul(beta_scale, T.sigmoid(y))
