"""Verify without per-token states: outputs only, the pool is read and not written; at most 16 tokens a request.

    o = P S_0^T + M V,   P = diag(e^G) Q + N K,   N = -M diag(e^G)        (specs/design/replay.md)

M and P are small and made once a head (kernels/replay/tokens.py, operands.py); the state goes from memory straight to
the registers in which it is an operand of the tensor cores, and meets nothing but P.

A piece of work is 32 * `tiles` rows of one value head of one request; a warp owns 8 * `tiles` of them, 64 registers of
state. A CTA goes through pieces that follow each other, with the tokens of the next one on their way; those that share
a key head share k, q and their products. Shared memory holds two blocks of k and q and of v, a few tables of [16, 16],
and P. Barriers of a piece:

    tokens are there    warp 3: gates; with a new key head warps 0 to 2: products of its tokens with each other
    products are there  warp 0: M and N
    M, N are there      all warps: copies of the next tokens are started; P, 32 columns each
    P is there          each warp alone: outputs of its rows

Loads are issued in the order in which they are needed. Few requests have one tile a warp, so that the state comes from
more SMs; both forms are in one program. Registers: at most 168, none spilled: a spilled one would return behind the
state. Shared memory: 41 KiB.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.replay import operands, tokens
from kernels.replay.config import Config
from kernels.tile import TM, each
from kernels.verify import signature
from kernels.warp import CHUNK, QUAD

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
    "tl.disable_thread_storage_sync": True,  # the barriers are where the steps say
}


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, a, b, A_log, dt_bias, pool, state_indices, cu_seqlens, o, scale, beta_scale.
    """
    QT, KT, VT, OT, AT, BT, AlogT, BiasT, PoolT, _, IndexT, CuT, *_ = signature.types(c)

    @T.prim_func
    def replay_outputs(
        q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
        pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, scale: T.float32, beta_scale: T.float32,
    ):  # fmt: skip
        _body(c, q, k, v, (a, b, A_log, dt_bias, beta_scale), pool, state_indices, cu_seqlens, o, scale)

    return replay_outputs


def _items(c, N, tiles: int):
    """Pieces of work: the rows of a CTA, of every value head of N requests."""
    return N * c.HV * (c.V // (c.warps * 8 * tiles))


@T.macro
def _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale):
    N = state_indices.shape[0]
    few = _items(c, N, c.few_tiles) <= c.ctas
    items = T.if_then_else(few, _items(c, N, c.few_tiles), T.min(_items(c, N, c.tiles), c.ctas))
    with T.Kernel(items, threads=c.threads) as cta:
        steps.assume_wide(q, 1)
        steps.assume_wide(k, 1)
        steps.assume_wide(v, 1)
        steps.assume_wide(o, 1)
        steps.assume_wide(pool, 1)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        shared = _shared(c)
        if few:
            _rows(c, c.few_tiles, items, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale)
        else:
            _rows(c, c.tiles, items, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale)


def _within(token, NT):
    """Where tokens start or end: 0 to NT, whatever the device says. As an unsigned number a negative one is large."""
    return T.cast(T.min(T.cast(token, "uint32"), T.cast(NT, "uint32")), "int32")


def _shared(c):
    """k and q, v (both of two pieces of work), gram, k_norm, q_norm, decay, beta, by_q, tables of M and N, P."""
    rows = c.warps * 8 * max(c.tiles, c.few_tiles)
    return (
        T.alloc_shared((2 * 2 * TM, c.K + CHUNK), "bfloat16"),  # padded: the rows of a matrix lie in different banks
        T.alloc_shared((2 * TM, rows + CHUNK), "bfloat16"),
        T.alloc_shared((2, tokens.AHEAD, tokens.PITCH), "float32"),
        *(T.alloc_shared((TM,), "float32") for _ in each(2)),
        T.alloc_shared((2, tokens.AHEAD), "float32"),
        *(T.alloc_shared((TM,), "float32") for _ in each(2)),
        T.alloc_shared((2, tokens.SPLIT, TM, tokens.TABLE), "bfloat16"),
        T.alloc_shared((tokens.SPLIT, c.K // QUAD, 4, tokens.MATRICES), "bfloat16"),
        T.alloc_shared((1,), "int32"),
    )


@T.macro
def _rows(c, tiles: int, ctas, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale):
    """The pieces of work of CTA `cta` of `ctas`, 8 `tiles` rows a warp, with the tokens of the next on their way."""
    NT, N, SLOTS = q.shape[0], state_indices.shape[0], pool.shape[0]
    KQ_s, V_s, gram, k_norm, q_norm, decay, beta, by_q, tables, P_s, end = shared
    rows = c.warps * 8 * tiles
    of_v = c.V // rows
    of_key = c.HV // c.H * of_v  # pieces in a row that share a key head
    items = _items(c, N, tiles)
    warp, lane = tx // 32, tx % 32
    r0 = warp * 8 * tiles
    state = T.alloc_local((tiles, c.K // QUAD, CHUNK), c.pool)
    raw = T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype)
    x, carry = T.alloc_local((TM,), "float32"), T.alloc_local((2,), "float32")
    slot, first, last, start, L = (T.alloc_var("int32") for _ in each(5))
    next_slot, next_first, next_last = (T.alloc_var("int32") for _ in each(3))
    begin, stop, nearest, unused = (T.alloc_var("int32") for _ in each(4))
    begin = T.cast(T.cast(items, "int64") * cta // ctas, "int32")
    stop = T.cast(T.cast(items, "int64") * (cta + 1) // ctas, "int32")
    if tx == 0:
        end[0] = T.min(T.max(cu_seqlens[N], 0), NT)
    slot = state_indices[begin // (c.HV * of_v)]
    first = _within(cu_seqlens[begin // (c.HV * of_v)], NT)
    last = _within(cu_seqlens[begin // (c.HV * of_v) + 1], NT)
    _stage(
        c, rows, q, k, v, KQ_s, V_s, begin // of_key % 2, True, 0, first, last, begin // of_v % c.HV,
        begin % of_v * rows, tx,
    )  # fmt: skip
    for i in each(len(raw)):
        T.clear(raw[i])
    if warp == 3:
        steps.load_raw_gates(*gates, *raw, tokens.nearest_token(first, lane, NT), begin // of_v % c.HV)
    for turn in T.serial(stop - begin):
        at = begin + turn
        n, h, v0 = at // (c.HV * of_v), at // of_v % c.HV, at % of_v * rows
        # Before the state, behind which they would return: a load returns after those that the SM issued before it.
        next_slot = state_indices[T.min(at + 1, items - 1) // (c.HV * of_v)]
        next_first = _within(cu_seqlens[T.min(at + 1, items - 1) // (c.HV * of_v)], NT)
        next_last = _within(cu_seqlens[T.min(at + 1, items - 1) // (c.HV * of_v) + 1], NT)
        nearest = T.max(T.min(slot, SLOTS - 1), 0)
        for i in T.unroll(tiles):
            for j in T.unroll(c.K // QUAD):
                for e in T.vectorized(CHUNK):
                    state[i, j, e] = pool[nearest, h, v0 + r0 + i * 8 + lane // 4, j * QUAD + lane % 4 * CHUNK + e]
        if ctas <= c.early_up_to:
            T.pdl_trigger()
        start = first
        L = T.min(last - first, TM)
        T.ptx_wait_group(1)
        T.sync_threads()
        if warp == 3 and lane < TM:
            steps.share_gates(gates, *raw, True, decay, T.view(beta, (1, TM)), 0, lane, lane < L)
            decay[1, lane + 1] = decay[0, lane]
            if lane == 0:
                decay[1, 0] = 1.0
        if turn == 0 or at % of_key == 0:
            tokens.share_products(
                KQ_s, at // of_key % 2 * 2 * TM, gram, k_norm, q_norm, scale, c.l2norm, c.K, warp, lane
            )  # fmt: skip
        T.sync_threads()
        T.clear(x)
        carry[tokens.BEHIND] = 0.0
        carry[tokens.DECAY] = 1.0
        if warp == 0:
            # A chain: of an `if` alone TileLang would make one for every statement in it.
            if L <= 4:
                tokens.share_outputs_of_values(gram, k_norm, q_norm, decay, beta, tables, by_q, x, carry, 4, lane)
            elif L <= 8:
                tokens.share_outputs_of_values(gram, k_norm, q_norm, decay, beta, tables, by_q, x, carry, 8, lane)
            elif L <= 12:
                tokens.share_outputs_of_values(gram, k_norm, q_norm, decay, beta, tables, by_q, x, carry, 12, lane)
            else:
                tokens.share_outputs_of_values(gram, k_norm, q_norm, decay, beta, tables, by_q, x, carry, 16, lane)
        T.sync_threads()
        if turn + 1 < stop - begin:
            _stage(
                c, rows, q, k, v, KQ_s, V_s, (at + 1) // of_key % 2, (at + 1) % of_key == 0, (turn + 1) % 2,
                next_first, next_last, (at + 1) // of_v % c.HV, (at + 1) % of_v * rows, tx,
            )  # fmt: skip
            if warp == 3:
                steps.load_raw_gates(*gates, *raw, tokens.nearest_token(next_first, lane, NT), (at + 1) // of_v % c.HV)
        operands.share_operand(KQ_s, at // of_key % 2 * 2 * TM, tables, by_q, P_s, c.K, c.warps, warp, lane)
        T.sync_threads()
        store_outputs(
            c, tiles, state, P_s, tables, V_s, turn % 2 * TM, o, slot >= 0 and slot < SLOTS, start, L, h, v0, r0, lane
        )
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        unused = end[0] + n
        while unused < NT:
            if lane < 8 * tiles:
                o[unused, h, v0 + r0 + lane] = T.bfloat16(0)
            unused = unused + N
        slot = next_slot
        first = next_first
        last = next_last
    T.pdl_trigger()


@T.macro
def _stage(c, rows: int, q, k, v, KQ_s, V_s, keys, fresh, values, first, last, h, v0, tx):
    """Start loading the tokens of a piece of work, k and q only if they are `fresh`."""
    L = T.min(last - first, TM)
    if fresh:
        tokens.stage_rows(k, first, h // (c.HV // c.H), 0, KQ_s, keys * 2 * TM, c.K, L, c.threads, tx)
        tokens.stage_rows(q, first, h // (c.HV // c.H), 0, KQ_s, keys * 2 * TM + TM, c.K, L, c.threads, tx)
    tokens.stage_rows(v, first, h, v0, V_s, values * TM, rows, L, c.threads, tx)
    T.ptx_commit_group()
    T.ptx_commit_group()  # an empty one, so that the wait can leave one: a wait for all is behind the state's loads


@T.macro
def store_outputs(
    c, tiles: int, state, P_s, tables, V_s, first, o, present, start, L, h, v0, r0, lane, history=None
):  # fmt: skip
    """o = P S_0^T + M V for the rows of this warp. Outputs go through the room of their values to be stored whole.

    Behind a `history` (M_h, its values, the row of the first) o has M_h V_h more.
    """
    A, values = T.alloc_local((8,), "uint32"), T.alloc_local((4,), "uint32")
    part = T.alloc_local((CHUNK,), "bfloat16")
    sums = T.alloc_local((tiles * 4,), "float32")
    g, quad = lane // 4, lane % 4
    T.clear(sums)
    operands.multiply_state(
        c, tiles, tokens.SPLIT, state, P_s, tables, V_s, first, r0, lane, A, values, part, sums, sums, history
    )
    T.sync_warp()
    for i in T.unroll(tiles):
        for half in T.unroll(2):
            for e in T.vectorized(2):
                V_s[first + half * 8 + g, r0 + i * 8 + quad * 2 + e] = T.Select(
                    present, T.cast(sums[i * 4 + half * 2 + e], "bfloat16"), T.bfloat16(0)
                )
    T.sync_warp()
    for i in T.unroll(T.ceildiv(TM * tiles, 32)):
        t, col = (i * 32 + lane) // tiles, (i * 32 + lane) % tiles * CHUNK
        if t < L:
            for e in T.vectorized(CHUNK):
                o[start + t, h, v0 + r0 + col + e] = V_s[first + t, r0 + col + e]
