"""The eight state rows of a warp in the chunk program: how they are loaded, carried from token to token and stored.

A row lies in 16 lanes, in 16-byte pieces as stored: one of 8 columns a lane for 16-bit states, two of 4 for fp32. So a
warp stores 512 contiguous bytes with each instruction. Lane l holds the rows l / 16 + 2 i, i = 0 to 3.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.verify.config import ROWS_PER_WARP
from kernels.warp import CHUNK, QUAD, bulk_store

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PADDING = {"bfloat16": QUAD, "float16": QUAD, "float32": 4}  # of a row in shared memory: 8 rows without conflicts


@T.macro
def stage_state(c, pool, slot, h, r0, state, pitch: int, warp, lane):
    """state[i * pitch :] = row r0 + i - 8 warp of pool[slot, h], for the 8 rows of this warp, asynchronously."""
    chunk = 16 // BYTES[c.pool]
    for i in T.unroll(ROWS_PER_WARP * c.K // chunk // 32):
        r = (i * 32 + lane) // (c.K // chunk)
        col = (i * 32 + lane) % (c.K // chunk) * chunk
        T.ptx_cp_async(
            T.access_ptr(state[(warp * ROWS_PER_WARP + r) * pitch + col], "w", chunk),
            T.access_ptr(pool[slot, h, r0 + r, col], "r", chunk),
            chunk,
        )
    T.ptx_commit_group()


@T.macro
def share_rows(c, S, carried_s, warp, lane):
    """The carried rows of this warp, in fp32, for all its lanes."""
    wide = 16 // BYTES[c.pool]
    for i in T.unroll(4):
        for piece in T.unroll(CHUNK // wide):
            for e in T.vectorized(wide):
                carried_s[
                    (warp * ROWS_PER_WARP + i * 2 + lane // 16) * (c.K + PADDING["float32"])
                    + column(c, piece, lane)
                    + e
                ] = S[i * CHUNK + piece * wide + e]


def column(c, piece: int, lane):
    """First of the columns of a lane's piece of 16 bytes: 16 lanes store a row, 256 contiguous bytes at a time."""
    wide = 16 // BYTES[c.pool]
    return piece * 16 * wide + lane % 16 * wide


@T.macro
def own_rows(c, state, pitch: int, own, warp, lane):
    """The 8 rows of this warp as they are stored, from shared memory."""
    wide = 16 // BYTES[c.pool]
    for i in T.unroll(4):
        for piece in T.unroll(CHUNK // wide):
            for e in T.vectorized(wide):
                own[i * CHUNK + piece * wide + e] = state[
                    (warp * ROWS_PER_WARP + i * 2 + lane // 16) * pitch + column(c, piece, lane) + e
                ]


@T.macro
def next_state(c, S, KQ_s, w_s, decay_s, head, t, warp, lane):
    """S = e^{g_t} S + w_t k_t^T"""
    wide = 16 // BYTES[c.pool]
    k_t = T.alloc_local((CHUNK,), "bfloat16")
    w_t = T.alloc_local((4,), "float32")
    for piece in T.unroll(CHUNK // wide):
        for e in T.vectorized(wide):
            k_t[piece * wide + e] = KQ_s[t, column(c, piece, lane) + e]
    for i in T.vectorized(4):
        w_t[i] = w_s[warp, t, lane // 16 * 4 + i]
    for i in T.unroll(4):
        for e in T.unroll(CHUNK):
            S[i * CHUNK + e] = S[i * CHUNK + e] * decay_s[head, t] + w_t[i] * T.cast(k_t[e], "float32")


@T.macro
def store_rows(c, S, states, at, h, r0, lane):
    """Store the 8 rows of this warp from its registers; `at`: the row and step of a buffer, or the slot of a pool."""
    wide = 16 // BYTES[c.pool]
    for i in T.unroll(4):
        for piece in T.unroll(CHUNK // wide):
            for e in T.vectorized(wide):
                states[(*at, h, r0 + i * 2 + lane // 16, column(c, piece, lane) + e)] = T.cast(
                    S[i * CHUNK + piece * wide + e], c.pool
                )


@T.macro
def bulk_store_rows(c, S, stage, buffer, pending: int, target, warp, lane):
    """Start storing the 8 rows of this warp at `target`; at most `pending` earlier stores may still read `stage`."""
    wide = 16 // BYTES[c.pool]
    at = (warp * 2 + buffer) * ROWS_PER_WARP * c.K
    if lane == 0:
        T.tma_store_wait(pending)
    T.sync_warp()
    for i in T.unroll(4):
        for piece in T.unroll(CHUNK // wide):
            for e in T.vectorized(wide):
                stage[at + (i * 2 + lane // 16) * c.K + column(c, piece, lane) + e] = T.cast(
                    S[i * CHUNK + piece * wide + e], c.pool
                )
    T.fence_proxy_async()
    T.sync_warp()
    if lane == 0:
        elements = ROWS_PER_WARP * c.K
        bulk_store(target, stage[at], elements, elements * BYTES[c.pool])
