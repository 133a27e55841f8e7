"""What warps do that work alone: no shared memory, no barrier, every operand in registers.

For one or two tokens nothing is worth sharing: a call is all latency (few requests) or all state traffic (many). A warp
owns `32 / lanes * rows` rows of one value head of one request: fewer while there are not enough warps to fill the GPU,
more where loading and normalising q and k weighs. Both are in one program, so that N never causes a compilation.

What every such program does for latency: all loads are issued before any is waited for, in the order in which they are
needed (a load returns after those that the SM issued before it, and only the states come from DRAM), and no branch
stands before them: that would hold back all other loads until the index is there. So padding is a predicate of the
state's loads, or loads the nearest slot, which another request may be writing, and keeps nothing of it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels import recurrent_steps as token
from kernels.recurrent_steps import CHUNK
from kernels.steps import load_activated_gates, load_raw_gates


def tile(c, rows: int) -> int:
    """State rows of a CTA whose lanes hold a part of `rows` rows each."""
    return c.threads // c.lanes * rows


def is_small(c, N):
    """Whether N requests are too few for `c.rows` rows a lane."""
    return N * c.HV * (c.V * c.lanes // (32 * c.few_rows)) <= c.few_up_to


def grid(c, N):
    """CTAs for N requests."""
    return N * c.HV * T.if_then_else(is_small(c, N), c.V // tile(c, c.few_rows), c.V // tile(c, c.rows))


def place(c, rows: int, cta, tx):
    """Request, value head, first row of this lane, and its place among the lanes of a row."""
    tiles = c.V // tile(c, rows)
    row = cta % tiles * tile(c, rows) + tx // 32 * (32 // c.lanes * rows) + tx % 32 // c.lanes
    return cta // (tiles * c.HV), cta // tiles % c.HV, row, tx % c.lanes


def token_buffers(c, chunks: int):
    """What a warp that works alone keeps of one token: as loaded, and as `advance` takes it."""
    raw = (
        T.alloc_local((chunks, CHUNK), "bfloat16"),
        T.alloc_local((chunks, CHUNK), "bfloat16"),
        T.alloc_local((2,), c.gate_dtype),
        T.alloc_local((1,), "float32"),
        T.alloc_local((1,), c.bias_dtype),
    )
    ready = (
        T.alloc_local((chunks, CHUNK), "float32"),
        T.alloc_local((chunks, CHUNK), "float32"),
        T.alloc_local((1, 2), "float32"),
        T.alloc_local((1,), "float32"),
    )
    return raw, ready


def separate(q, k, v):
    """Where element e of a head of token t stands in q, k [., H, K] and v [., HV, V]."""
    return lambda t, head, e: q[t, head, e], lambda t, head, e: k[t, head, e], lambda t, head, e: v[t, head, e]


def packed(c, mixed):
    """The same in mixed [., 2 H K + HV V], rows of q, k and v behind each other."""
    at_k, at_v = c.H * c.K, 2 * c.H * c.K
    return (
        lambda t, head, e: mixed[t, head * c.K + e],
        lambda t, head, e: mixed[t, at_k + head * c.K + e],
        lambda t, head, e: mixed[t, at_v + head * c.V + e],
    )


@T.macro
def load_token(c, q, k, gates, raw, t, head, col, chunks: int):
    """This lane's chunks of q and k of token t, and its gates: all loads in flight, none waited for."""
    raw_k, raw_q, x, y, z = raw
    hk = head // (c.HV // c.H)
    for j in T.unroll(chunks):
        for e in T.vectorized(CHUNK):
            raw_k[j, e] = k(t, hk, (j * c.lanes + col) * CHUNK + e)
        for e in T.vectorized(CHUNK):
            raw_q[j, e] = q(t, hk, (j * c.lanes + col) * CHUNK + e)
    if c.raw_gates:
        load_raw_gates(*gates, x, y, z, t, head)
    else:
        load_activated_gates(*gates, x, y, z, t, head)


@T.macro
def load_values(c, v, raw_v, t, head, row, rows: int):
    """raw_v = v of token t for the rows of this lane."""
    for r in T.unroll(rows):
        raw_v[r] = v(t, head, row + r * (32 // c.lanes))


@T.macro
def load_state(c, present, pool, slot, head, row, col, state, rows: int, chunks: int):
    """state = this lane's part of pool[slot, head], or zeros where not `present`."""
    for r in T.unroll(rows):
        for j in T.unroll(chunks):
            for e in T.vectorized(CHUNK):
                state[r, j, e] = T.if_then_else(
                    present,
                    pool[slot, head, row + r * (32 // c.lanes), (j * c.lanes + col) * CHUNK + e],
                    T.cast(0, pool.dtype),
                )


@T.macro
def load_nearest_state(c, pool, slot, head, row, col, state, rows: int, chunks: int):
    """state = this lane's part of pool[slot, head], or of the nearest slot where there is no such slot."""
    nearest = T.alloc_var("int32")  # a variable: inside the address it would be computed in 64 bits
    nearest = T.max(T.min(slot, pool.shape[0] - 1), 0)
    T.sync_warp()  # keeps the compiler from moving these loads, the slowest, ahead of the others
    token.load_rows(pool, (nearest, head), row, col, state, rows, chunks, c.lanes)


@T.macro
def prepare_token(c, gates, raw, ready, scale, chunks: int):
    """From `load_token` to the operands of `advance`, all but v: k_n, q_n, (e^g, beta), k_n . q_n."""
    raw_k, raw_q, x, y, z = raw
    key, query, coef, kq = ready
    for j in T.unroll(chunks):
        for e in T.vectorized(CHUNK):
            key[j, e] = T.cast(raw_k[j, e], "float32")
        for e in T.vectorized(CHUNK):
            query[j, e] = T.cast(raw_q[j, e], "float32")
    token.normalise(key, query, kq, scale, c.l2norm, chunks, c.lanes)
    if c.raw_gates:
        token.raw_gates(y[0], x[0], z[0], x[1], gates[4], coef, 0, 0, 1)
    else:
        coef[0, 0] = T.exp(x[0])
        coef[0, 1] = x[1]


@T.macro
def store_outputs(c, x, present, o, t, head, row, col, rows: int):
    """o[t, head, .] = x, or 0 where not `present`: of the lanes of a row the first ones store a row each."""
    if col < rows:
        value = T.cast(chosen(x, col, rows), "bfloat16")
        o[t, head, row + col * (32 // c.lanes)] = T.Select(present, value, T.bfloat16(0))


@T.macro
def clear_outputs(c, o, t, head, row, col, rows: int):
    """o[t, head, .] = 0 for the rows of this lane."""
    if col < rows:
        o[t, head, row + col * (32 // c.lanes)] = T.bfloat16(0)


def chosen(x, i, count: int):
    """x[i] of a local array, by selects: registers have no address."""
    found = x[count - 1]
    for j in reversed(range(count - 1)):
        found = T.Select(i == j, x[j], found)
    return found
