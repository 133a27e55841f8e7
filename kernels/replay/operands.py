"""The operands of the products that touch a state, and of those of a history (specs/design/replay.md).

P is made of the tables of kernels/replay/tokens.py and kept in shared memory, in the order in which lanes hold state
columns, as are keys for the product that is added to a state.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.replay.tokens import OF_HISTORY, OF_OUTPUTS, OF_STATE, SPLIT, load_table, split
from kernels.steps import bf16_part
from kernels.tile import TM, each
from kernels.verify.config import PARTS
from kernels.warp import CHUNK, QUAD, by_8, by_16, load_matrices, mma


@T.macro
def multiply_state(
    c, tiles: int, parts: int, state, P_s, tables, V_s, first, r0, lane, A, values, part, sums, low, history=None
):  # fmt: skip
    """sums += M V + P state^T for the rows of this warp: two fragments of 8 rows a tile, rows are tokens.

    M is the table of outputs (or W). Where 24 bits are wanted, with three parts, small products go to `low`. Behind a
    `history` (M_h, its values, the row of the first) sums += M_h V_h. A, values and part are room: uint32 [4 parts],
    uint32 [4], bf16 [8].
    """
    load_table(tables, OF_OUTPUTS, A, parts, lane)
    for pair in T.unroll(T.ceildiv(tiles, 2)):
        # With one tile the second half of the matrices is the first again.
        row, col = by_16(lane)
        load_matrices(V_s[first + row, r0 + pair * TM + col % (8 * tiles)], values, 0, True)
        for p in each(parts):
            for i in T.unroll(min(tiles, 2)):
                mma(A, p * 4, values, i * 2, low if p > 0 and parts > 2 else sums, (pair * 2 + i) * 4)
        if history is not None:
            load_matrices(history[1][history[2] + row, r0 + pair * TM + col % (8 * tiles)], values, 0, True)
            for p in each(SPLIT):
                for i in T.unroll(min(tiles, 2)):
                    mma(history[0], p * 8, values, i * 2, sums, (pair * 2 + i) * 4)
    for j in T.unroll(c.K // QUAD):
        for half in T.unroll(2):
            for p in each(parts):
                load_operand(P_s, p, j, half, A, p * 4, lane)
            for i in T.unroll(tiles):
                for s in each(PARTS[c.pool]):
                    if c.pool == "bfloat16":
                        for p in each(parts):
                            mma(A, p * 4, state, (i * (c.K // QUAD) + j) * CHUNK + half * 4, sums, i * 4)
                    else:
                        for e in T.unroll(4):
                            part[e] = bf16_part(state[i, j, half * 4 + e], s)
                        for p in each(min(parts, PARTS[c.pool] + 1 - s)):  # fp32 sums keep no more
                            mma(A, p * 4, part, 0, low if p + s > 0 and parts > 2 else sums, i * 4)


@T.macro
def share_operand(KQ_s, row0, tables, by_q, P_s, K: int, warps: int, warp, lane, history=None):
    """P_s[p, j, ...] = part p of P = diag(by_q) Q + N K, for the columns 32 j to 32 j + 31 of the state.

    Behind a `history` (N_h, K_h, row of its first key, e^G of it) it is P = e^G (diag(by_q) Q + N K) + N_h K_h.
    """
    A, q = T.alloc_local((SPLIT * 4,), "uint32"), T.alloc_local((8,), "uint32")
    P, by = T.alloc_local((16,), "float32"), T.alloc_local((2,), "float32")
    load_table(tables, OF_STATE, A, SPLIT, lane)
    for half in T.unroll(2):
        by[half] = by_q[half * 8 + lane // 4]
    for turn in T.unroll(T.ceildiv(K // QUAD, warps)):
        j = turn * warps + warp
        if j < K // QUAD:
            for pair in T.unroll(2):
                load_matrices(KQ_s[row0 + TM + by_16(lane)[0], j * QUAD + pair * TM + by_16(lane)[1]], q, pair * 4)
            for m in T.unroll(4):
                for half in T.unroll(2):
                    P[m * 4 + half * 2] = by[half] * T.reinterpret(q[m * 2 + half] << 16, "float32")
                    P[m * 4 + half * 2 + 1] = by[half] * T.reinterpret(
                        q[m * 2 + half] & T.uint32(0xFFFF0000), "float32"
                    )
            add_product(A, KQ_s, row0, j, P, SPLIT, lane)
            if history is not None:
                for i in T.unroll(16):
                    P[i] = P[i] * history[3]
                add_product(history[0], history[1], history[2], j, P, SPLIT, lane)
            store_operand(P, P_s, j, SPLIT, lane)


@T.macro
def share_operand_of_keys(K_s, row0, tables, P_s, K: int, parts: int, warps: int, warp, lane):
    """The same for P = N K."""
    A = T.alloc_local((parts * 4,), "uint32")
    P = T.alloc_local((16,), "float32")
    load_table(tables, OF_STATE, A, parts, lane)
    for turn in T.unroll(T.ceildiv(K // QUAD, warps)):
        j = turn * warps + warp
        if j < K // QUAD:
            T.clear(P)
            add_product(A, K_s, row0, j, P, parts, lane)
            store_operand(P, P_s, j, parts, lane)


@T.macro
def add_product(A, K_s, row0, j, P, parts: int, lane):
    """P += A K for the columns 32 j to 32 j + 31: four fragments of 8 columns. A is uint32 or bf16."""
    k = T.alloc_local((8,), "uint32")
    fragment = 4 if A.dtype == "uint32" else 8
    for pair in T.unroll(2):
        load_matrices(K_s[row0 + by_16(lane)[0], j * QUAD + pair * TM + by_16(lane)[1]], k, pair * 4, True)
    for p in each(parts):
        for m in T.unroll(4):
            mma(A, p * fragment, k, m * 2, P, m * 4)


@T.macro
def store_operand(P, P_s, j, parts: int, lane):
    """P_s[p, j, ...] = part p of four fragments of 8 columns. Destroys P.

    A product over state columns takes 16 of them: those that lane c holds of a state row are 32 j + 8 c + 0 to 7, the
    first four for one product, the others for the next. So their matrices have the columns 8 c + 2 m + (0, 1), c = 0 to
    3, for m = 0 to 3; P_s has them in this order, rows 0 to 7, then 8 to 15.
    """
    part = T.alloc_local((CHUNK,), "bfloat16")
    g, c = lane // 4, lane % 4
    for p in each(parts):
        for half in T.unroll(2):
            for m in T.unroll(4):
                split(P, m * 4 + half * 2, part, m * 2, 2)
            for e in T.vectorized(CHUNK):
                P_s[p, j, c, half * 64 + g * CHUNK + e] = part[e]


@T.macro
def load_operand(P_s, p: int, j, half, A, at, lane):
    """A[at : at + 4] = the fragment of part p of P for one product, 16 tokens by 16 state columns."""
    load_matrices(P_s[p, j, half * 2 + lane // TM, lane % TM * CHUNK], A, at)


@T.macro
def load_keys(K_s, row0, j, k, lane):
    """k[0:16] (bf16) = columns 32 j to 32 j + 31 of 16 keys: of keys g and g + 8 those that `share_columns` stores."""
    for half in T.unroll(2):
        load_matrices(K_s[row0 + half * 8 + lane % 8, j * QUAD + lane // 8 * CHUNK], k, half * 8)


@T.macro
def share_columns(k, columns, j, lane):
    """columns[0, j, m, ...] = 8 columns of 16 keys: elements 2 m and 2 m + 1 of the four lanes of a state row,
    32 j + 8 c + 2 m + (0, 1) for c = 0 to 3."""
    for half in T.unroll(2):
        for e in T.vectorized(CHUNK):
            columns[0, j, lane % 4, half * 64 + lane // 4 * CHUNK + e] = k[half * 8 + e]


@T.macro
def load_columns(columns, j, half, B, lane):
    """B[0:4] = two fragments B: 16 tokens by the state columns of m = 2 half, and of m = 2 half + 1."""
    load_matrices(columns[0, j, half * 2 + lane // TM, lane % TM * CHUNK], B, 0, True)


@T.macro
def behind_history(tables, cross_q, cross_k, by_q, factors, M_h, N_h, lane):
    """M_h[t, j], what the value v_j = 1 of the history adds to o_t of the tokens behind it, and N_h[t, j] = M_h[t, j]
    factors[j]: fragments A of two parts each, bf16 [16].

        M_h = X W_h,  X[t, i] = by_q[t] (q_t . k_i) + sum_s N[t, s] (k_s . k_i),  i in the history, s and t not

    cross_q[0, t, i] = q_t . k_i; cross_k[p, i, s] = part p of k_s . k_i.
    """
    A, B = T.alloc_local((SPLIT * 4,), "uint32"), T.alloc_local((SPLIT * 4,), "uint32")
    X, X_parts = T.alloc_local((8,), "float32"), T.alloc_local((SPLIT * 8,), "bfloat16")
    g, c = lane // 4, lane % 4
    load_table(tables, OF_STATE, A, SPLIT, lane)
    for p in each(SPLIT):
        load_matrices(cross_k[p, by_8(lane)[0], by_8(lane)[1]], B, p * 4)
    for tile in T.unroll(2):
        for half in T.unroll(2):
            for e in T.vectorized(2):
                X[tile * 4 + half * 2 + e] = cross_q[0, half * 8 + g, tile * 8 + c * 2 + e]
    for half in T.unroll(2):
        for tile in T.unroll(2):
            for e in T.unroll(2):
                X[tile * 4 + half * 2 + e] = X[tile * 4 + half * 2 + e] * by_q[half * 8 + g]
    multiply_parts(A, 4, B, X)
    # The fragment of a sum is that of an operand A whose contraction runs over its columns.
    for p in each(SPLIT):
        split(X, 0, X_parts, p * 8, 8)
        load_matrices(tables[OF_HISTORY, p, by_8(lane)[0], by_8(lane)[1]], B, p * 4)
    T.clear(X)
    multiply_parts(X_parts, 8, B, X)
    split_twice(X, M_h, N_h, factors, c)


@T.macro
def multiply_parts(A, fragment: int, B, X):
    """X += A B of 16 x 16, each the sum of two parts; the product of the two low ones is below what fp32 sums keep."""
    for p, s in ((0, 0), (0, 1), (1, 0)):
        for tile in T.unroll(2):
            mma(A, p * fragment, B, s * 4 + tile * 2, X, tile * 4)


@T.macro
def split_twice(X, M_h, N_h, factors, c):
    """M_h = the parts of X, N_h = those of X times the factors of its columns. Destroys X."""
    Y = T.alloc_local((8,), "float32")
    for tile in T.unroll(2):
        for half in T.unroll(2):
            for e in T.unroll(2):
                Y[tile * 4 + half * 2 + e] = X[tile * 4 + half * 2 + e] * factors[tile * 8 + c * 2 + e]
    for p in each(SPLIT):
        split(X, 0, M_h, p * 8, 8)
        split(Y, 0, N_h, p * 8, 8)
