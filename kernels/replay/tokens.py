"""The steps of the output-only form (specs/design/replay.md): what the tokens of a block do to each other, once a head.

With the recurrence on readouts of specs/design/chunk-form.md every result is linear in v and in the state as read:

    o = (diag(e^G) Q + N K) S_0^T + M V = P S_0^T + M V,  N = -M diag(e^G)

Column j of M is what a value v_j = 1 alone does to the outputs, so the recurrence runs on 16 columns instead of on the
V rows of the state. k and q stay raw; norms and scales are numbers of a token, applied in fp32.

Lanes are (g, c) = (lane // 4, lane % 4), as in kernels/warp.py. A small operand of a product is the sum of two bf16
parts, 16 bits of its fp32 value.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.steps import inverse_norm
from kernels.tile import TM
from kernels.warp import CHUNK, QUAD, load_chunk, mma, rows_fragment

PITCH = TM + 4  # of a [16, 16] table in shared memory: rows start 4 banks apart
BEHIND, DECAY = 0, 1  # of `carry`: w for the lanes of Q; e^{G_j}
AHEAD = TM + 1  # in the last step of Q the lanes of R load behind the last token, and do not use it


@T.macro
def share_products(KQ_s, row0, gram, k_norm, q_norm, scale, l2norm: bool, L, K: int, warp, g, c):
    """gram[0, i, t] = k_i . k_t and gram[1, i, t] = k_i . q_t, raw; the norms from the diagonals.

    KQ_s has k in the 16 rows from row0 on and q in the next 16.
    k_norm[t] = 1 / |k_t|, q_norm[t] = scale / |q_t|. Warps 0, 1 take k, warps 2, 3 q; of both the second takes i >= 8,
    or nothing with at most 8 tokens.
    """
    low, high, by, own = (T.alloc_local((CHUNK,), "bfloat16") for _ in range(4))
    A = T.alloc_local((2 * CHUNK,), "bfloat16")
    sums, squares = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")  # two chains halve the latency
    kind, tile = warp // 2, warp % 2
    if tile == 0 or L > TM // 2:
        T.clear(sums)
        T.clear(squares)
        for j in T.unroll(K // QUAD):
            load_chunk(KQ_s, row0 + kind * TM + g, j, c, low)
            load_chunk(KQ_s, row0 + kind * TM + 8 + g, j, c, high)
            if kind == 1:
                load_chunk(KQ_s, row0 + tile * 8 + g, j, c, by)
            rows_fragment(low, high, A)
            _choose(tile == 0, low, high, own)
            if kind == 0:
                _choose(tile == 0, low, high, by)
            for half in T.unroll(2):
                mma(A, half * CHUNK, by, half * 4, sums, half * 4)
                mma(A, half * CHUNK, own, half * 4, squares, half * 4)
        for i in T.unroll(4):
            sums[i] = sums[i] + sums[4 + i]
            squares[i] = squares[i] + squares[4 + i]
        for e in T.unroll(2):
            gram[kind, tile * 8 + c * 2 + e, g] = sums[e]
            gram[kind, tile * 8 + c * 2 + e, g + 8] = sums[2 + e]
        if c == g // 2:  # this lane has the diagonal's entries of token 8 tile + g
            square = T.alloc_var("float32")
            square = T.Select(
                tile == 0, T.Select(g % 2 == 0, squares[0], squares[1]), T.Select(g % 2 == 0, squares[2], squares[3])
            )
            if kind == 0:
                k_norm[tile * 8 + g] = inverse_norm(square, 1.0, l2norm)
            else:
                q_norm[tile * 8 + g] = inverse_norm(square, scale, l2norm)


@T.macro
def _choose(first, a, b, chosen):
    """chosen = a if `first` else b."""
    if first:
        for e in T.vectorized(CHUNK):
            chosen[e] = a[e]
    else:
        for e in T.vectorized(CHUNK):
            chosen[e] = b[e]


@T.macro
def share_outputs_of_values(gram, k_norm, q_norm, decay, beta, M_s, N_s, by_q, x, carry, tokens: int, lane):
    """M_s[t, j] = what v_j = 1 adds to o_t; N_s[t, j] = - M_s[t, j] e^{G_j} / |k_j|; by_q[t] = e^{G_t} scale / |q_t|.

        u_i = beta_i ([i = j] - e^{g_i} R_i / |k_i|);  w_i = u_i / |k_i|
        R_t = e^{g_i} R_t + w_i (k_i . k_t);  Q_t = e^{g_i} Q_t + w_i (k_i . q_t), t >= i;  o_t = scale Q_t / |q_t|

    Lane j has R of column j, lane 16 + j its Q, one step behind: w comes from the other lane meanwhile. One warp, at
    most `tokens` tokens. x [16] = 0 and carry = (0, 1) on entry.
    """
    row = T.alloc_local((TM,), "float32")
    coef = T.alloc_local((3,), "float32")  # of a step: e^g, 1 / |k|, beta / |k|
    w = T.alloc_var("float32")
    kind, j = lane // TM, lane % TM
    for i in tuple(range(tokens + 1)):
        _load_step(gram, k_norm, decay, beta, row, coef, i, T.max(i - kind, 0) if i == 0 else i - kind, tokens, kind)
        d = coef[0]
        if i < tokens:
            w = (T.Select(i == j, T.float32(1), T.float32(0)) - d * (coef[1] * x[i])) * coef[2]
            if i <= j:
                carry[DECAY] = carry[DECAY] * d
        w = T.Select(kind == 0, w, carry[BEHIND])
        for t in T.unroll(max(i - 1, 0), tokens):
            x[t] = d * x[t] + w * row[t]
        carry[BEHIND] = T.shfl_sync(w, j)
    carry[DECAY] = T.shfl_sync(carry[DECAY], j)
    # Everything is loaded before anything is stored: a load behind a store waits for it.
    for m in T.unroll(tokens // 4):
        for e in T.vectorized(4):
            row[m * 4 + e] = q_norm[m * 4 + e]
    w = T.Select(kind == 1, -k_norm[j], q_norm[j]) * carry[DECAY]
    if kind == 1:
        for t in T.unroll(tokens):
            x[t] = row[t] * x[t]
            M_s[t, j] = x[t]
        for t in T.unroll(tokens):
            N_s[t, j] = w * x[t]
    else:
        by_q[j] = w


@T.macro
def _load_step(gram, k_norm, decay, beta, row, coef, i: int, step, tokens: int, kind):
    """What step i needs: token i for lanes of R, token i - 1 for lanes of Q, which are zero before their first."""
    coef[0] = decay[step]
    coef[1] = k_norm[step]
    coef[2] = beta[step] * k_norm[step]
    for m in T.unroll(max(i - 1, 0) // 4, tokens // 4):
        for e in T.vectorized(4):
            row[m * 4 + e] = gram[kind, step, m * 4 + e]


def token_of(part: int, c):
    """The token in the place `part` of a lane's four in a product over tokens: any order does if both sides agree.

    This one reads four rows of shared memory with few conflicts, and only the first eight tokens in the first two.
    """
    return c + part * 4


@T.macro
def parts_of_table(table, parts, two_tiles: bool, g, c):
    """parts[0:16] = fragments of the bf16 parts of table[t, i], a [16, 16] operand with rows t and columns in the order
    of `token_of`.

    With at most 8 tokens, one fragment with the first parts in rows 0 to 7 and the second parts in rows 8 to 15;
    otherwise one fragment of the first parts, then one of the second.
    """
    x = T.alloc_local((8,), "float32")
    for p in tuple(range(4)):
        at = p // 2 * 4 + p % 2
        if two_tiles:
            x[at] = table[g, token_of(p, c)]
            x[at + 2] = table[g + 8, token_of(p, c)]
        else:
            x[at] = table[g, token_of(p, c)] if p < 2 else T.float32(0)
    split_fragment(x, parts, two_tiles)


@T.macro
def split_fragment(x, parts, two_tiles: bool):
    """x[half * 4 + e], x[half * 4 + 2 + e]: columns 8 half + 2 c + e of rows g and g + 8, as the sum of two parts.

    Destroys x.
    """
    for part in tuple(range(2)):
        for half in T.unroll(2):
            for row in T.unroll(2 if two_tiles else 1):
                at = part * 8 + half * 4 + row * 2 if two_tiles else half * 4 + part * 2
                for e in T.vectorized(2):
                    parts[at + e] = T.cast(x[half * 4 + row * 2 + e], "bfloat16")
                for e in T.unroll(2):
                    x[half * 4 + row * 2 + e] = x[half * 4 + row * 2 + e] - T.cast(parts[at + e], "float32")


@T.macro
def share_operand(KQ_s, row0, N_s, by_q, P_s, two_tiles: bool, K: int, warps: int, warp, lane, g, c):
    """P_s[s, :, lane, :] = fragments of the parts of P = diag(by_q) Q + N K, for 16 columns s of the state.

    The columns are those that a lane holds of a state row: 32 j + 8 c + 4 half + 0 to 3, s = 2 j + half.
    """
    table, parts = T.alloc_local((16,), "bfloat16"), T.alloc_local((16,), "bfloat16")
    k_rows, q_rows = T.alloc_local((4, CHUNK), "bfloat16"), T.alloc_local((2, CHUNK), "bfloat16")
    k, P = T.alloc_local((4,), "bfloat16"), T.alloc_local((8,), "float32")
    by = T.alloc_local((2,), "float32")
    parts_of_table(N_s, table, two_tiles, g, c)
    for r in T.unroll(2):
        by[r] = by_q[g + r * 8]
    for turn in T.unroll(T.ceildiv(K // QUAD, warps)):
        j = turn * warps + warp
        if j < K // QUAD:
            for i in T.unroll(4 if two_tiles else 2):
                for e in T.vectorized(CHUNK):
                    k_rows[i, e] = KQ_s[row0 + token_of(i, c), j * QUAD + g // 2 * CHUNK + e]
            for r in T.unroll(2 if two_tiles else 1):
                for e in T.vectorized(CHUNK):
                    q_rows[r, e] = KQ_s[row0 + TM + r * 8 + g, j * QUAD + c * CHUNK + e]
            for half in T.unroll(2):
                for tile in T.unroll(2):
                    at = half * 4 + tile * 2
                    for e in T.unroll(2):
                        P[tile * 4 + e] = by[0] * T.cast(q_rows[0, at + e], "float32")
                        if two_tiles:
                            P[tile * 4 + 2 + e] = by[1] * T.cast(q_rows[1, at + e], "float32")
                        else:
                            P[tile * 4 + 2 + e] = 0.0
                    for i in tuple(range(4)):
                        if two_tiles or i < 2:
                            k[i] = T.Select(g % 2 == 0, k_rows[i, at], k_rows[i, at + 1])
                        else:
                            k[i] = T.bfloat16(0)
                    mma(table, 0, k, 0, P, tile * 4)
                    if two_tiles:
                        mma(table, 8, k, 0, P, tile * 4)
                    else:
                        for e in T.unroll(2):  # the two parts of the same rows
                            P[tile * 4 + e] = P[tile * 4 + e] + P[tile * 4 + 2 + e]
                split_fragment(P, parts, two_tiles)
                for piece in T.unroll(2 if two_tiles else 1):
                    for e in T.vectorized(8):
                        P_s[j * 2 + half, piece, lane, e] = parts[piece * 8 + e]
