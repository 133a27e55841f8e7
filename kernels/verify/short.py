"""Verify with per-token states for requests of one or two tokens, in the registers of warps that work alone.

    d = e^g;  u = beta (v - d S k);  o = d S q + u (k . q);  S = d S + u k^T        stored for every token

Each warp owns 32 / `lanes` * `rows` rows of one value head of one request, loads and normalises q and k itself, and
holds its rows in registers, `lanes` neighbouring lanes a row; there is no shared memory and no barrier
(kernels/lone_warps.py). Tokens are unrolled: those beyond `tokens` of a request are not computed.

The arithmetic is that of kernels/recurrent_steps.py, so one token has the bits of a decode call. Over several tokens
the state stays fp32 and only its stored copies are rounded; with `lossless` each token starts from the stored copy.

Registers: at most 128; 168 for two tokens of a 16-bit pool.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import lone_warps
from kernels import recurrent_steps as token
from kernels.recurrent_steps import CHUNK
from kernels.tile import each
from kernels.verify import signature
from kernels.verify.config import ShortConfig as Config

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
}


def build(c: Config) -> Any:
    """The program, with the parameters of `signature.build`."""
    return signature.build(c, "verify_short", _body)


@T.macro
def _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale):
    NT, N = q.shape[0], state_indices.shape[0]
    qkv = lone_warps.separate(q, k, v)
    with T.Kernel(lone_warps.grid(c, N), threads=c.threads) as cta:
        signature.assume_wide(q, k, v, o, pool, states)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        if lone_warps.is_small(c, N):
            _rows(c, c.few_rows, cta, tx, qkv, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale, NT)
        else:
            _rows(c, c.rows, cta, tx, qkv, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale, NT)


@T.macro
def _rows(c, rows: int, cta, tx, qkv, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale, NT):
    """All tokens of one request for the rows of this lane; missing tokens load others and keep nothing of them."""
    N, SLOTS, chunks = state_indices.shape[0], pool.shape[0], c.K // CHUNK // c.lanes
    q, k, v = qkv
    n, h, row, col = lone_warps.place(c, rows, cta, tx)
    buffers = [lone_warps.token_buffers(c, chunks) for _ in each(c.tokens)]
    raw_v = [T.alloc_local((rows,), "bfloat16") for _ in each(c.tokens)]
    v_t = T.alloc_local((rows,), "float32")
    o_t = T.alloc_local((rows,), "float32")
    state = T.alloc_local((rows, chunks, CHUNK), c.pool)
    S = T.alloc_local((rows, chunks, CHUNK), "float32")
    slot = T.alloc_var("int32")
    start = T.alloc_var("int32")
    length = T.alloc_var("int32")
    kept = T.alloc_var("int32")
    stored = T.alloc_var("int32")  # tokens whose state is kept
    unused = T.alloc_var("int32")
    slot = state_indices[n]
    start = T.max(cu_seqlens[n], 0)
    length = T.min(cu_seqlens[n + 1], NT) - start
    kept = state_rows[n]
    unused = T.min(T.max(cu_seqlens[N], 0), NT) + n
    present = slot >= 0 and slot < SLOTS
    stored = T.if_then_else(present and kept >= 0 and kept < states.shape[0], T.min(length, states.shape[1]), 0)
    for i in each(c.tokens):
        t = T.max(T.min(start + i, NT - 1), 0)
        lone_warps.load_token(c, q, k, gates, buffers[i][0], t, h, col, chunks)
        lone_warps.load_values(c, v, raw_v[i], t, h, row, rows)
    lone_warps.load_nearest_state(c, pool, slot, h, row, col, state, rows, chunks)
    T.pdl_trigger()
    for i in each(c.tokens):
        lone_warps.prepare_token(c, gates, *buffers[i], scale, chunks)
    token.widen(state, S, rows, chunks)
    for i in each(c.tokens):
        key, query, coef, kq = buffers[i][1]
        if i > 0 and c.lossless:
            token.widen(state, S, rows, chunks)
        for r in T.unroll(rows):
            v_t[r] = T.cast(raw_v[i][r], "float32")
        token.advance(S, key, query, v_t, coef[0, 0], coef[0, 1], kq[0], o_t, rows, chunks, c.lanes)
        token.narrow(S, state, rows, chunks)
        if i < stored:
            token.store_rows(state, states, (kept, i, h), row, col, rows, chunks, c.lanes)
        if i < length:
            lone_warps.store_outputs(c, o_t, present, o, start + i, h, row, col, rows)
        if c.commit:  # noqa: SIM102
            if present and length == i + 1:
                token.store_rows(state, pool, (slot, h), row, col, rows, chunks, c.lanes)
    # Rows of o that belong to no request are zero: request n clears every N-th of them.
    while unused < NT:
        lone_warps.clear_outputs(c, o, unused, h, row, col, rows)
        unused = unused + N
