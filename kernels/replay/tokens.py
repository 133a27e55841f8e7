"""The steps of the output-only form (specs/design/replay.md): what the tokens of a block do to each other, once a head.

With the recurrence on readouts of specs/design/chunk-form.md every result is linear in v and in the state as read:

    o = (diag(e^G) Q + N K) S_0^T + M V = P S_0^T + M V,  N = -M diag(e^G)

Column j of M is what a value v_j = 1 alone does to the outputs, so the recurrence runs on 16 columns instead of on the
V rows of the state. k and q stay raw; norms and scales are numbers of a token, applied in fp32.

Lanes are (g, c) = (lane // 4, lane % 4), as in kernels/warp.py. A small operand of a product is the sum of two bf16
parts, 16 bits of its fp32 value, or of three. Tables of such an operand are kept transposed, [part, j, t], so that the
lane that has a column stores it in 16-byte pieces.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.steps import inverse_norm, stage_chunk
from kernels.tile import TM, each
from kernels.warp import CHUNK, by_8, by_16, load_matrices, mma

PITCH = TM + 4  # of a [16, 16] table of fp32 in shared memory: rows start 4 banks apart
TABLE = TM + CHUNK  # of one of bf16: the rows of a matrix lie in different banks
BEHIND, DECAY = 0, 1  # of `carry`: w for the lanes of Q; e^{G_j}
AHEAD = TM + 4  # in the last step of Q the lanes of R load behind the last token, and do not use it
OF_OUTPUTS, OF_STATE, OF_HISTORY = 0, 1, 2  # tables: M (or W), N; W of a history
SPLIT = 2  # bf16 parts of a small operand
MATRICES = 2 * 64 + TM  # of P: two 8 x 8 matrices, padded so that the four lanes of a row store without conflicts


def nearest_token(first, lane, NT):
    """The token of a lane, counted from `first` >= 0, or the nearest one."""
    return T.min(first, NT - 1) + T.min(lane % TM, NT - 1 - T.min(first, NT - 1))


@T.macro
def stage_rows(x, t0, head, col0, dst, row0, cols: int, L, threads: int, tx):
    """dst[row0 + t, 0:cols] = x[t0 + t, head, col0 : col0 + cols] for t < L, else 0."""
    for i in T.unroll(T.ceildiv(TM * cols // CHUNK, threads)):
        piece = i * threads + tx
        t, col = piece // (cols // CHUNK), piece % (cols // CHUNK) * CHUNK
        if TM * cols // CHUNK % threads == 0 or t < TM:
            stage_chunk(x, t0 + t, head, col0 + col, dst, row0 + t, col, t < L)


@T.macro
def stage_window(x, slot, first, head, col0, dst, row0, cols: int, L, threads: int, tx):
    """dst[row0 + t, 0:cols] = row first + t of the ring x[slot], [rows, heads, dim], for t < L, else 0."""
    row = T.alloc_var("int32")  # of 32 bits; in an index it would be worked out in 64
    for i in T.unroll(T.ceildiv(TM * cols // CHUNK, threads)):
        piece = i * threads + tx
        t, col = piece // (cols // CHUNK), piece % (cols // CHUNK) * CHUNK
        row = in_ring(first + t, x.shape[1])
        if TM * cols // CHUNK % threads == 0 or t < TM:
            T.ptx_cp_async(
                T.access_ptr(dst[row0 + t, col], "w", CHUNK),
                T.access_ptr(x[slot, row, head, col0 + col], "r", CHUNK),
                CHUNK,
                predicate=t < L,
            )


def in_ring(row, rows):
    """Row `row` < 2 `rows` of a ring."""
    return T.Select(row >= rows, row - rows, row)


@T.macro
def multiply(X_s, a_row, b_row, sums, K: int, lane):
    """sums[0:8] = the products of 16 rows of X_s with 16 others: as a fragment, columns 0 to 7, then 8 to 15.

    Destroys sums[8:16], of a second chain that halves the latency.
    """
    multiply_two(X_s, a_row, X_s, b_row, sums, K, lane)


@T.macro
def multiply_two(X_s, a_row, Y_s, b_row, sums, K: int, lane):
    """The same for 16 rows of X_s with 16 of Y_s."""
    A, B = T.alloc_local((4,), "uint32"), T.alloc_local((4,), "uint32")
    T.clear(sums)
    for s in T.unroll(K // TM):
        load_matrices(X_s[a_row + by_16(lane)[0], s * TM + by_16(lane)[1]], A, 0)
        load_matrices(Y_s[b_row + by_8(lane)[0], s * TM + by_8(lane)[1]], B, 0)
        mma(A, 0, B, 0, sums, s % 2 * 8)
        mma(A, 0, B, 2, sums, s % 2 * 8 + 4)
    for i in T.unroll(8):
        sums[i] = sums[i] + sums[8 + i]


@T.macro
def share_product(sums, gram, index, lane):
    """gram[index] = what `multiply` found."""
    g, c = lane // 4, lane % 4
    for tile in T.unroll(2):
        for half in T.unroll(2):
            for e in T.vectorized(2):
                gram[index, half * 8 + g, tile * 8 + c * 2 + e] = sums[tile * 4 + half * 2 + e]


@T.macro
def share_parts(sums, parts_of, lane):
    """parts_of[p, i, s] = part p of what `multiply` found. Destroys sums."""
    part = T.alloc_local((2,), "bfloat16")
    g, c = lane // 4, lane % 4
    for p in each(SPLIT):
        for tile in T.unroll(2):
            for half in T.unroll(2):
                split(sums, tile * 4 + half * 2, part, 0, 2)
                for e in T.vectorized(2):
                    parts_of[p, half * 8 + g, tile * 8 + c * 2 + e] = part[e]


@T.macro
def share_norms(sums, norm, scale, l2norm: bool, lane):
    """norm[t] = scale / |x_t| from the products of 16 tokens with themselves."""
    g, c = lane // 4, lane % 4
    if c == g // 2:  # this lane has the diagonal's entries of tokens g and g + 8
        for half in T.unroll(2):
            square = T.Select(g % 2 == 0, sums[half * 6], sums[half * 6 + 1])
            norm[half * 8 + g] = inverse_norm(square, scale, l2norm)


@T.macro
def share_products(KQ_s, row0, gram, k_norm, q_norm, scale, l2norm: bool, K: int, warp, lane):
    """gram[0, i, t] = k_i . k_t and gram[1, i, t] = k_i . q_t, raw; the norms from the diagonals.

    KQ_s has k in the 16 rows from row0 on and q in the next 16. k_norm[t] = 1 / |k_t|, q_norm[t] = scale / |q_t|.
    Warp 0 multiplies k by k, warp 1 k by q, warp 2 q by q.
    """
    sums = T.alloc_local((16,), "float32")
    if warp < 3:
        multiply(KQ_s, row0 + warp // 2 * TM, row0 + (warp + 1) // 2 * TM, sums, K, lane)
        if warp < 2:
            share_product(sums, gram, warp, lane)
        if warp == 0:
            share_norms(sums, k_norm, 1.0, l2norm, lane)
        if warp == 2:
            share_norms(sums, q_norm, scale, l2norm, lane)


@T.macro
def share_outputs_of_values(
    gram, k_norm, q_norm, decay, beta, tables, by_q, x, carry, tokens: int, lane
):  # fmt: skip
    """Tables of M[t, j], what v_j = 1 adds to o_t, and of N[t, j] = - M[t, j] e^{G_j} / |k_j|;
    by_q[t] = e^{G_t} scale / |q_t|.

        u_i = beta_i ([i = j] - e^{g_i} R_i / |k_i|);  w_i = u_i / |k_i|
        R_t = e^{g_i} R_t + w_i (k_i . k_t);  Q_t = e^{g_i} Q_t + w_i (k_i . q_t), t >= i;  o_t = scale Q_t / |q_t|

    Lane j has R of column j, lane 16 + j its Q, one step behind: w comes from the other lane meanwhile. One warp, at
    most `tokens` tokens. x [16] = 0 and carry = (0, 1) on entry.
    """
    row = T.alloc_local((TM,), "float32")
    decays, k_inv, betas = (T.alloc_local((4,), "float32") for _ in each(3))  # of four steps
    w = T.alloc_var("float32")
    kind, j = lane // TM, lane % TM
    for i in each(tokens + 1):
        if i % 4 == 0:
            for e in T.vectorized(4):
                decays[e] = decay[kind, i + e]
            if i < tokens:
                for e in T.vectorized(4):
                    k_inv[e] = k_norm[i + e]
                for e in T.vectorized(4):
                    betas[e] = beta[i + e]
        for m in T.unroll(max(i - 1, 0) // 4, tokens // 4):
            for e in T.vectorized(4):
                row[m * 4 + e] = gram[kind, T.max(i - kind, 0) if i == 0 else i - kind, m * 4 + e]
        if i < tokens:
            w = (T.Select(i == j, T.float32(1), T.float32(0)) - decays[i % 4] * (k_inv[i % 4] * x[i])) * (
                betas[i % 4] * k_inv[i % 4]
            )
            if i <= j:
                carry[DECAY] = carry[DECAY] * decays[i % 4]
        w = T.Select(kind == 0, w, carry[BEHIND])
        for t in T.unroll(max(i - 1, 0), tokens):
            x[t] = decays[i % 4] * x[t] + w * row[t]
        carry[BEHIND] = T.shfl_sync(w, j)
    # Everything is loaded before anything is stored: a load behind a store waits for it.
    for m in T.unroll(tokens // 4):
        for e in T.vectorized(4):
            row[m * 4 + e] = q_norm[m * 4 + e]
    w = T.Select(kind == 1, T.float32(1), -k_norm[j] * carry[DECAY])
    carry[BEHIND] = q_norm[j] * carry[DECAY]
    for t in T.unroll(tokens):
        x[t] = T.shfl_sync(x[t], TM + j) * (row[t] * w)
    if kind == 0:
        by_q[j] = carry[BEHIND]
    share_column(x, tables, 1 - kind, j, SPLIT)


@T.macro
def updates_of_values(gram, index, k_norm, decay, beta, end_decay, x, carry, tokens: int, lane):
    """x = column j = lane % 16 of W, the factors of the raw k_i in the state after all tokens if v_j = 1 alone; in the
    upper half of the warp of N[i, j] = W[i, j] carry[DECAY], carry[DECAY] = - e^{G_j} / |k_j|. end_decay[0] = e^G of
    all tokens. Steps as in `share_outputs_of_values`, with gram[index, i, t] = k_i . k_t:

        W[i, j] = w_i times the decays after i

    One warp, at most `tokens` tokens. x [16] = 0 and carry[DECAY] = 1 on entry.
    """
    row = T.alloc_local((TM,), "float32")
    decays = T.alloc_local((TM,), "float32")
    k_inv, betas = T.alloc_local((4,), "float32"), T.alloc_local((4,), "float32")  # of four steps
    w = T.alloc_var("float32")
    j = lane % TM
    for m in T.unroll(tokens // 4):
        for e in T.vectorized(4):
            decays[m * 4 + e] = decay[0, m * 4 + e]
    for i in each(tokens):
        if i % 4 == 0:
            for e in T.vectorized(4):
                k_inv[e] = k_norm[i + e]
            for e in T.vectorized(4):
                betas[e] = beta[i + e]
        for m in T.unroll((i + 1) // 4, tokens // 4):
            for e in T.vectorized(4):
                row[m * 4 + e] = gram[index, i, m * 4 + e]
        w = (T.Select(i == j, T.float32(1), T.float32(0)) - decays[i] * (k_inv[i % 4] * x[i])) * (
            betas[i % 4] * k_inv[i % 4]
        )
        carry[DECAY] = carry[DECAY] * T.Select(i <= j, decays[i], T.float32(1))
        for t in T.unroll(i + 1, tokens):
            x[t] = decays[i] * x[t] + w * row[t]
        x[i] = w
    carry[DECAY] = -k_norm[j] * carry[DECAY]
    w = T.Select(lane < TM, T.float32(1), carry[DECAY])
    for i in each(tokens)[::-1]:
        x[i] = x[i] * w
        w = w * decays[i]
    if lane == 0:
        end_decay[0] = w


@T.macro
def share_column(x, tables, table, j, parts: int):
    """tables[table, :, j, :] = the parts of column j. Destroys x."""
    part = T.alloc_local((TM,), "bfloat16")
    for p in each(parts):
        split(x, 0, part, 0, TM)
        for half in T.unroll(2):
            for e in T.vectorized(CHUNK):
                tables[table, p, j, half * CHUNK + e] = part[half * CHUNK + e]


@T.macro
def split(x, x0, part, part0, count: int):
    """part[part0 : part0 + count] = x[x0 : x0 + count] rounded to bf16; x keeps what is missing."""
    for i in T.unroll(count // 2):
        for e in T.vectorized(2):
            part[part0 + i * 2 + e] = T.cast(x[x0 + i * 2 + e], "bfloat16")
    for i in T.unroll(count):
        x[x0 + i] = x[x0 + i] - T.cast(part[part0 + i], "float32")


@T.macro
def load_table(tables, table, A, parts: int, lane):
    """A[4 p : 4 p + 4] = the fragment of part p of a table as a [16, 16] operand with rows t and columns j."""
    for p in each(parts):
        load_matrices(tables[table, p, by_8(lane)[0], by_8(lane)[1]], A, p * 4, True)
