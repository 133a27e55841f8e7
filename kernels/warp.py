"""What one warp does by itself: tensor-core products of 16 x 8 x 16, 16-byte accesses, bulk stores.

Lane (g, c) = (lane // 4, lane % 4). A fragment of `mma` gives lane (g, c) four columns of the contraction of row g.
Which four is free as long as both operands agree, so a lane holds 8 *contiguous* columns for two products: one 16-byte
access where the usual order takes four of 4 bytes. A row of K columns is K / 32 such chunks of a lane: chunk j of lane
c is columns 32 j + 8 c to 32 j + 8 c + 7.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T
from tilelang import tvm

CHUNK = 8  # columns of a lane in two products
QUAD = 4 * CHUNK  # columns of the four lanes of a row
EVICT_FIRST = 1  # TileLang's number for this cache hint


@T.macro
def mma(A, a0, B, b0, C, c0=0):
    """C[c0 : c0 + 4] += A B: A[a0 : a0 + 8] is 16 x 16, B[b0 : b0 + 4] is 16 x 8; bf16 operands, fp32 sums.

    An operand may also be uint32, two bf16 an element: then its offset counts these, and it has half as many.
    """
    T.ptx_mma(
        "float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32", A.data, a0, B.data, b0, C.data, c0, T.bool(False)
    )


@T.macro
def rows_fragment(low, high, A, a0=0):
    """A[a0 : a0 + 16] = the two A fragments of 16 rows, from a chunk of row g (`low`) and of row g + 8 (`high`)."""
    for p in T.unroll(4):
        for e in T.vectorized(2):
            A[a0 + p * 4 + e] = low[p * 2 + e]
        for e in T.vectorized(2):
            A[a0 + p * 4 + 2 + e] = high[p * 2 + e]


@T.macro
def load_chunk(x, row, j, c, chunk):
    """Chunk j of lane c from a row of x in shared memory."""
    for e in T.vectorized(CHUNK):
        chunk[e] = x[row, j * QUAD + c * CHUNK + e]


def by_16(lane):
    """Row and column of the address that a lane gives to `load_matrices`: matrices (0, 0), (8, 0), (0, 8), (8, 8).

    Of [16 rows, 16 contraction] it is a fragment A; of [16 contraction, 16 columns], transposed, two fragments B.
    """
    return lane % 16, lane // 16 * 8


def by_8(lane):
    """The same for (0, 0), (0, 8), (8, 0), (8, 8): of [16 columns, 16 contraction] two fragments B; of
    [16 contraction, 16 rows], transposed, a fragment A."""
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


@T.macro
def load_matrices(row, out, at, transposed: bool = False):
    """out[at : at + 4] (uint32) or out[at : at + 8] (bf16) = four 8 x 8 matrices of bf16 in shared memory, each two
    elements a lane.

    `row` is where lane l has row l % 8 of matrix l // 8, 16 bytes. Lane (g, c) gets columns 2 c, 2 c + 1 of row g, or
    `transposed` rows 2 c, 2 c + 1 of column g.
    """
    T.ptx_ldmatrix(
        T.bool(transposed),
        4,
        T.access_ptr(row, "r", CHUNK),
        T.access_ptr(out[at], "w", 4 if out.dtype == "uint32" else CHUNK),
    )


@T.macro
def bulk_store(target, source, elements: int, nbytes: int):
    """Start copying `elements` contiguous elements from shared to global memory; one lane calls it.

    Shared memory must have been written before a `fence_proxy_async` of its writers, and must stay as it is until
    `tma_store_wait`. The lines are the first to leave L2: nothing reads them soon.
    """
    T.call_intrin(
        "handle",
        tvm.ir.Op.get("tl.tma_store"),
        T.access_ptr(target, "w", elements),
        T.access_ptr(source, "r", elements),
        nbytes,
        0,  # a store, not an addition
        EVICT_FIRST,
    )
    T.tma_store_arrive()
