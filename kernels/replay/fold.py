"""The state after the accepted tokens of every request, from the pool and the inputs; at most 16 tokens a request.

    S_L = e^G S_0 + Z^T K,   Z = W V + P S_0^T,   P = N K,   N = -W diag(e^G)       (specs/design/replay.md)

W and P are small and made once a head (kernels/replay/tokens.py, operands.py). The state goes from memory to the
registers in which it is an operand of the first product, is added to the second one there, and goes back from there. Z,
one row a token, is stored by a warp for its own rows of the state and read back transposed.

Work is dealt out as in kernels/replay/outputs.py, and the barriers of a piece are the same:

    tokens are there    warp 3: gates; with a new key head warp 0: products of the keys, the others: keys by columns
    products are there  warp 0: W and N
    W, N are there      all warps: copies of the next tokens are started; P, 32 columns each
    P is there          each warp alone: its rows of the state

Tokens that were not accepted are absent: zeros, with decay 1 and beta 0. Shared memory: 44 KiB for a bf16 pool.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.replay import operands, tokens
from kernels.replay.config import FoldConfig as Config
from kernels.tile import TM, each
from kernels.verify import signature
from kernels.warp import CHUNK, QUAD, by_8, load_matrices, mma

OLD_KEYS = 2  # of the `gram` of a program with a history: products of older keys with each other

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
    "tl.disable_thread_storage_sync": True,  # the barriers are where the steps say
}


def build(c: Config) -> Any:
    """The program's parameters, in order:

    k, v, a, b, A_log, dt_bias, pool, state_indices, target_indices, cu_seqlens, lengths, beta_scale.
    """
    _, KT, VT, _, AT, BT, AlogT, BiasT, PoolT, _, IndexT, CuT, TargetT, *_ = signature.types(c)
    LengthT = T.Tensor(IndexT.shape, "int32")

    @T.prim_func
    def replay_fold(
        k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
        pool: PoolT, state_indices: IndexT, target_indices: TargetT, cu_seqlens: CuT, lengths: LengthT,
        beta_scale: T.float32,
    ):  # fmt: skip
        _body(c, k, v, (a, b, A_log, dt_bias, beta_scale), pool, (state_indices, target_indices, cu_seqlens, lengths))

    return replay_fold


def _items(c, N, tiles: int):
    """Pieces of work: the rows of a CTA, of every value head of N requests."""
    return N * c.HV * (c.V // (c.warps * 8 * tiles))


@T.macro
def _body(c, k, v, gates, pool, requests):
    N = requests[0].shape[0]
    few = _items(c, N, c.few_tiles) <= c.ctas
    items = T.if_then_else(few, _items(c, N, c.few_tiles), T.min(_items(c, N, c.tiles), c.ctas))
    with T.Kernel(items, threads=c.threads) as cta:
        steps.assume_wide(k, 1)
        steps.assume_wide(v, 1)
        steps.assume_wide(pool, 1)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        shared = _shared(c)
        if few:
            _rows(c, c.few_tiles, items, cta, tx, shared, k, v, gates, pool, requests)
        else:
            _rows(c, c.tiles, items, cta, tx, shared, k, v, gates, pool, requests)


def _shared(c):
    """k and v (both of two pieces of work), gram, k_norm, decay, beta, e^G, tables of W and N, P, k by columns, Z."""
    rows = c.warps * 8 * max(c.tiles, c.few_tiles)
    return (
        T.alloc_shared((2 * TM, c.K + CHUNK), "bfloat16"),  # padded: the rows of a matrix lie in different banks
        T.alloc_shared((2 * TM, rows + CHUNK), "bfloat16"),
        T.alloc_shared((1, TM, tokens.PITCH), "float32"),
        T.alloc_shared((TM,), "float32"),
        T.alloc_shared((1, TM), "float32"),
        T.alloc_shared((TM,), "float32"),
        T.alloc_shared((1,), "float32"),
        T.alloc_shared((2, c.parts, TM, tokens.TABLE), "bfloat16"),
        T.alloc_shared((c.parts, c.K // QUAD, 4, tokens.MATRICES), "bfloat16"),
        T.alloc_shared((1, c.K // QUAD, 4, tokens.MATRICES), "bfloat16"),
        T.alloc_shared((c.parts * TM, rows + CHUNK), "bfloat16"),
    )


@T.macro
def _rows(c, tiles: int, ctas, cta, tx, shared, k, v, gates, pool, requests):
    """The pieces of work of CTA `cta` of `ctas`, 8 `tiles` rows a warp, with the tokens of the next on their way."""
    state_indices, target_indices, cu_seqlens, lengths = requests
    NT, N, SLOTS = k.shape[0], state_indices.shape[0], pool.shape[0]
    K_s, V_s, gram, k_norm, decay, beta, end_decay, tables, P_s, columns, Z_s = shared
    rows = c.warps * 8 * tiles
    of_v = c.V // rows
    of_key = c.HV // c.H * of_v  # pieces in a row that share a key head
    items = _items(c, N, tiles)
    warp, lane = tx // 32, tx % 32
    r0 = warp * 8 * tiles
    state = T.alloc_local((tiles, c.K // QUAD, CHUNK), c.pool)
    raw = T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype)
    x, carry = T.alloc_local((TM,), "float32"), T.alloc_local((2,), "float32")
    sums, keys = T.alloc_local((16,), "float32"), T.alloc_local((TM,), "bfloat16")
    slot, target, start, L = (T.alloc_var("int32") for _ in each(4))
    next_slot, next_target, next_start, next_L = (T.alloc_var("int32") for _ in each(4))
    begin, stop = T.alloc_var("int32"), T.alloc_var("int32")
    begin = T.cast(T.cast(items, "int64") * cta // ctas, "int32")
    stop = T.cast(T.cast(items, "int64") * (cta + 1) // ctas, "int32")
    slot = state_indices[begin // (c.HV * of_v)]
    target = target_indices[begin // (c.HV * of_v)]
    start = T.max(cu_seqlens[begin // (c.HV * of_v)], 0)
    L = _accepted(
        lengths[begin // (c.HV * of_v)], cu_seqlens[begin // (c.HV * of_v)], cu_seqlens[begin // (c.HV * of_v) + 1], NT
    )
    _stage(
        c, rows, k, v, K_s, V_s, begin // of_key % 2, True, 0, start, L, begin // of_v % c.HV, begin % of_v * rows, tx
    )
    for i in each(len(raw)):
        T.clear(raw[i])
    if warp == 3:
        steps.load_raw_gates(*gates, *raw, tokens.nearest_token(start, lane, NT), begin // of_v % c.HV)
    for turn in T.serial(stop - begin):
        at = begin + turn
        h, v0 = at // of_v % c.HV, at % of_v * rows
        following = T.min(at + 1, items - 1) // (c.HV * of_v)
        # Before the state, behind which they would return: a load returns after those that the SM issued before it.
        next_slot = state_indices[following]
        next_target = target_indices[following]
        next_start = T.max(cu_seqlens[following], 0)
        next_L = _accepted(lengths[following], cu_seqlens[following], cu_seqlens[following + 1], NT)
        if slot >= 0 and slot < SLOTS:
            for i in T.unroll(tiles):
                for j in T.unroll(c.K // QUAD):
                    for e in T.vectorized(CHUNK):
                        state[i, j, e] = pool[slot, h, v0 + r0 + i * 8 + lane // 4, j * QUAD + lane % 4 * CHUNK + e]
        else:  # padding: no other slot is read, somebody might write it
            T.clear(state)
        if ctas <= c.early_up_to:
            T.pdl_trigger()
        T.ptx_wait_group(1)
        T.sync_threads()
        if warp == 3 and lane < TM:
            steps.share_gates(gates, *raw, True, decay, T.view(beta, (1, TM)), 0, lane, lane < L)
        if turn == 0 or at % of_key == 0:
            if warp == 0:
                tokens.multiply(K_s, at // of_key % 2 * TM, at // of_key % 2 * TM, sums, c.K, lane)
                tokens.share_product(sums, gram, 0, lane)
                tokens.share_norms(sums, k_norm, 1.0, c.l2norm, lane)
            else:
                for i in T.unroll(T.ceildiv(c.K // QUAD, c.warps - 1)):
                    if i * (c.warps - 1) + warp - 1 < c.K // QUAD:
                        operands.load_keys(K_s, at // of_key % 2 * TM, i * (c.warps - 1) + warp - 1, keys, lane)
                        operands.share_columns(keys, columns, i * (c.warps - 1) + warp - 1, lane)
        T.sync_threads()
        T.clear(x)
        carry[tokens.DECAY] = 1.0
        if warp == 0:
            # A chain: of an `if` alone TileLang would make one for every statement in it.
            if L <= 4:
                tokens.updates_of_values(gram, 0, k_norm, decay, beta, end_decay, x, carry, 4, lane)
            elif L <= 8:
                tokens.updates_of_values(gram, 0, k_norm, decay, beta, end_decay, x, carry, 8, lane)
            elif L <= 12:
                tokens.updates_of_values(gram, 0, k_norm, decay, beta, end_decay, x, carry, 12, lane)
            else:
                tokens.updates_of_values(gram, 0, k_norm, decay, beta, end_decay, x, carry, 16, lane)
            tokens.share_column(x, tables, lane // TM, lane % TM, c.parts)
        T.sync_threads()
        if turn + 1 < stop - begin:
            _stage(
                c, rows, k, v, K_s, V_s, (at + 1) // of_key % 2, (at + 1) % of_key == 0, (turn + 1) % 2,
                next_start, next_L, (at + 1) // of_v % c.HV, (at + 1) % of_v * rows, tx,
            )  # fmt: skip
            if warp == 3:
                steps.load_raw_gates(*gates, *raw, tokens.nearest_token(next_start, lane, NT), (at + 1) // of_v % c.HV)
        operands.share_operand_of_keys(K_s, at // of_key % 2 * TM, tables, P_s, c.K, c.parts, c.warps, warp, lane)
        T.sync_threads()
        if slot >= 0 and slot < SLOTS and target >= 0 and target < SLOTS:
            if L > 0:
                updates(c, tiles, state, P_s, tables, V_s, turn % 2 * TM, Z_s, r0, lane)
                T.sync_warp()
                add_updates(c, tiles, state, Z_s, columns, end_decay, pool, target, h, v0, r0, lane)
            elif target != slot:
                for i in T.unroll(tiles):
                    for j in T.unroll(c.K // QUAD):
                        for e in T.vectorized(CHUNK):
                            pool[target, h, v0 + r0 + i * 8 + lane // 4, j * QUAD + lane % 4 * CHUNK + e] = state[
                                i, j, e
                            ]
        slot = next_slot
        target = next_target
        start = next_start
        L = next_L
    T.pdl_trigger()


def _accepted(length, first, last, NT):
    """The tokens to apply of those of a request, also where the lengths make no sense."""
    return T.max(T.min(T.min(length, TM), T.max(T.min(last, NT), 0) - T.max(first, 0)), 0)


@T.macro
def _stage(c, rows: int, k, v, K_s, V_s, keys, fresh, values, start, L, h, v0, tx):
    """Start loading the tokens of a piece of work, k only if it is `fresh`."""
    if fresh:
        tokens.stage_rows(k, start, h // (c.HV // c.H), 0, K_s, keys * TM, c.K, L, c.threads, tx)
    tokens.stage_rows(v, start, h, v0, V_s, values * TM, rows, L, c.threads, tx)
    T.ptx_commit_group()
    T.ptx_commit_group()  # an empty one, so that the wait can leave one: a wait for all is behind the state's loads


@T.macro
def updates(c, tiles: int, state, P_s, tables, V_s, first, Z_s, r0, lane):
    """Z_s[p, t, row] = part p of Z = W V + P state^T, for the rows of this warp.

    A tensor core cuts off what a sum cannot hold, each time that it adds to it. Where 24 bits are wanted, small
    products are summed apart.
    """
    A, values = T.alloc_local((c.parts * 4,), "uint32"), T.alloc_local((4,), "uint32")
    part, z = T.alloc_local((CHUNK,), "bfloat16"), T.alloc_local((2,), "bfloat16")
    sums, low = T.alloc_local((tiles * 4,), "float32"), T.alloc_local((tiles * 4,), "float32")
    g, quad = lane // 4, lane % 4
    T.clear(sums)
    T.clear(low)
    operands.multiply_state(c, tiles, c.parts, state, P_s, tables, V_s, first, r0, lane, A, values, part, sums, low)
    if c.parts > 2:
        for i in T.unroll(tiles * 4):
            sums[i] = sums[i] + low[i]
    T.sync_warp()  # a ring has its Z where these values were
    for p in each(c.parts):
        for i in T.unroll(tiles):
            for half in T.unroll(2):
                tokens.split(sums, i * 4 + half * 2, z, 0, 2)
                for e in T.vectorized(2):
                    Z_s[p * TM + half * 8 + g, r0 + i * 8 + quad * 2 + e] = z[e]


@T.macro
def add_updates(c, tiles: int, state, Z_s, columns, end_decay, pool, target, h, v0, r0, lane):
    """state = end_decay state + Z^T K for the rows of this warp, rounded to what the pool has, and stored in it."""
    A, B = T.alloc_local((c.parts * 4,), "uint32"), T.alloc_local((4,), "uint32")
    sums = T.alloc_local((16,), "float32")
    decay = T.alloc_var("float32")
    decay = end_decay[0]
    for pair in T.unroll(T.ceildiv(tiles, 2)):
        row, col = by_8(lane)
        for p in each(c.parts):
            load_matrices(Z_s[p * TM + row, r0 + pair * TM + col % (8 * tiles)], A, p * 4, True)
        for j in T.unroll(c.K // QUAD):
            if c.parts > 2 or tiles == 1:
                T.clear(sums)
            if c.parts == 2:
                for m in T.unroll(4):
                    for i in T.unroll(min(tiles, 2)):
                        for e in T.unroll(2):
                            sums[m * 4 + i * 2 + e] = decay * T.cast(state[pair * 2 + i, j, m * 2 + e], "float32")
            for half in T.unroll(2):
                operands.load_columns(columns, j, half, B, lane)
                for p in each(c.parts)[::-1]:
                    for m in T.unroll(2):
                        mma(A, p * 4, B, m * 2, sums, (half * 2 + m) * 4)
            if c.parts > 2:
                for m in T.unroll(4):
                    for i in T.unroll(min(tiles, 2)):
                        for e in T.unroll(2):
                            sums[m * 4 + i * 2 + e] = (
                                decay * state[pair * 2 + i, j, m * 2 + e] + sums[m * 4 + i * 2 + e]
                            )
            for i in T.unroll(min(tiles, 2)):
                for m in T.unroll(4):
                    for e in T.vectorized(2):
                        state[pair * 2 + i, j, m * 2 + e] = T.cast(sums[m * 4 + i * 2 + e], c.pool)
                for e in T.vectorized(CHUNK):
                    pool[target, h, v0 + r0 + (pair * 2 + i) * 8 + lane // 4, j * QUAD + lane % 4 * CHUNK + e] = state[
                        pair * 2 + i, j, e
                    ]


@T.macro
def fold_in_place(
    c, tiles: int, state, F_s, gram, norm, decay, beta, end_decay, tables, P_s, x, carry, sums, keys,
    raw, gates, pool, marks, slot, folding, fold, h, v0, r0, warp, lane,
):  # fmt: skip
    """The state of a piece of work becomes that after `folding` tokens, whose values are in F_s from row 0 on, their
    keys from row 16 on, and their gates in `raw`; it is stored, and marked as the result of `fold`."""
    T.ptx_wait_group(1)
    T.sync_threads()
    if warp == 1 and lane < TM:
        steps.share_gates(
            (0, 0, 0, 0, gates[2]), *raw, True, decay, T.view(beta, (1, TM)), 0, lane, lane < folding
        )  # fmt: skip
    if warp == 0:
        tokens.multiply(F_s, TM, TM, sums, c.K, lane)
        tokens.share_product(sums, gram, OLD_KEYS, lane)
        tokens.share_norms(sums, norm, 1.0, c.l2norm, lane)
    T.sync_threads()
    T.clear(x)
    carry[tokens.DECAY] = 1.0
    if warp == 0:
        tokens.updates_of_values(gram, OLD_KEYS, norm, decay, beta, end_decay, x, carry, TM, lane)
        tokens.share_column(x, tables, lane // TM, lane % TM, c.parts)
    T.sync_threads()
    operands.share_operand_of_keys(F_s, TM, tables, P_s, c.K, c.parts, c.warps, warp, lane)
    if warp < c.K // QUAD:
        operands.load_keys(F_s, TM, warp, keys, lane)
    T.sync_threads()
    updates(c, tiles, state, P_s, tables, F_s, 0, F_s, r0, lane)
    T.sync_threads()
    if warp < c.K // QUAD:
        operands.share_columns(keys, P_s, warp, lane)
    T.sync_threads()
    add_updates(c, tiles, state, F_s, P_s, end_decay, pool, slot, h, v0, r0, lane)
    if warp == 0 and lane < 8 * tiles * c.warps // c.marked:
        marks[slot, h, v0 // c.marked + lane] = fold
