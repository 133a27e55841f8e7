"""Outputs of new tokens behind a state and up to 16 accepted tokens that it does not hold yet (specs/design/replay.md).

    o = P S_0^T + M V + M_h V_h,   P = e^{G_h} (diag(e^G) Q + N K) + N_h K_h

The accepted tokens of a request, its history, lie in a ring of rows beside its state, and the new tokens are added
behind them. A request whose history grew too long has older tokens before it that are folded into its state first.
Work is dealt out as kernels/replay/dealing.py says. Barriers of a piece:

    tokens are there    gates (warp 2: history, warp 3: new tokens); with a new key head products of tokens
    products are there  warp 0: M and N, warp 1: W of the history
    M, N, W are there   all warps: the next tokens are started; M_h, N_h; P, 32 columns each
    P is there          each warp alone: new tokens to the ring, outputs of its rows

and before them, of a request that folds:

    old tokens are there, products, W and N, P    as in kernels/replay/fold.py
    Z is there                                    keys by columns, where P was
    columns are there                             each warp alone: its rows of the state

Only the piece that has the rows of a state touches them, and the cursors are moved by another launch
(kernels/replay/cursors.py), so that nothing races. Whether a piece has folded is marked with the number of the fold, so
that a call can be repeated. Shared memory: 83 KiB for a bf16 pool.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.replay import dealing, operands, tokens
from kernels.replay.config import WindowConfig as Config
from kernels.replay.fold import OLD_KEYS, fold_in_place
from kernels.replay.outputs import store_outputs
from kernels.tile import TM, each
from kernels.verify import signature
from kernels.warp import CHUNK, QUAD
from reference.ring import CURSORS

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
    "tl.disable_thread_storage_sync": True,  # the barriers are where the steps say
}

NEW_KEYS, NEW_QUERIES = 0, 1  # of `gram`: products of new keys with new keys, new queries; then OLD_KEYS


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, a, b, A_log, dt_bias, pool, state_indices, cu_seqlens, o, ring_k, ring_v, ring_a, ring_b, cursors, marks,
    scale, beta_scale.
    """
    QT, KT, VT, OT, AT, BT, AlogT, BiasT, PoolT, _, IndexT, CuT, *_ = signature.types(c)
    SLOTS, ROWS = PoolT.shape[0], T.dynamic("ROWS")
    RKT, RVT = T.Tensor((SLOTS, ROWS, c.H, c.K), "bfloat16"), T.Tensor((SLOTS, ROWS, c.HV, c.V), "bfloat16")
    RAT, RBT = (T.Tensor((SLOTS, ROWS, c.HV), c.gate_dtype) for _ in range(2))
    CursorT, MarkT = T.Tensor((SLOTS, CURSORS), "int32"), T.Tensor((SLOTS, c.HV, c.V // c.marked), "int32")

    @T.prim_func
    def replay_window(
        q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
        pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT,
        ring_k: RKT, ring_v: RVT, ring_a: RAT, ring_b: RBT, cursors: CursorT, marks: MarkT,
        scale: T.float32, beta_scale: T.float32,
    ):  # fmt: skip
        new, ring = (q, k, v, a, b), (ring_k, ring_v, ring_a, ring_b)
        _body(c, new, ring, (A_log, dt_bias, beta_scale), pool, (state_indices, cu_seqlens, cursors), marks, o, scale)

    return replay_window


@T.macro
def _body(c, new, ring, gates, pool, requests, marks, o, scale):
    N = requests[0].shape[0]
    few = dealing.few_pieces(c, N)
    ctas = T.if_then_else(c.requests < N, c.ctas, dealing.ctas_of_block(c, N, few))
    with T.Kernel(T.if_then_else(c.requests < N, T.ceildiv(N, c.requests) * c.ctas, ctas), threads=c.threads) as cta:
        for x in each(3):
            steps.assume_wide(new[x], 1)
        steps.assume_wide(o, 1)
        steps.assume_wide(pool, 1)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        shared = _shared(c)
        if few:
            _rows(c, c.few_tiles, ctas, cta, tx, shared, new, ring, gates, pool, requests, marks, o, scale)
        else:
            _rows(c, c.tiles, ctas, cta, tx, shared, new, ring, gates, pool, requests, marks, o, scale)


def _shared(c):
    """New k and q, k of the history, v of both (all of two pieces of work), tokens to fold; products; numbers of tokens
    (k_norm, q_norm, old_norm, decay, old_decay, beta, old_beta, by_q, factors); e^G; tables, P; order of the requests,
    units of work."""
    rows = c.warps * 8 * max(c.tiles, c.few_tiles)
    return (
        T.alloc_shared((2 * 2 * TM, c.K + CHUNK), "bfloat16"),  # padded: the rows of a matrix lie in different banks
        T.alloc_shared((2 * TM, c.K + CHUNK), "bfloat16"),
        T.alloc_shared((2 * TM, rows + CHUNK), "bfloat16"),
        T.alloc_shared((2 * TM, rows + CHUNK), "bfloat16"),
        T.alloc_shared((max(c.parts, 2) * TM, max(rows, c.K) + CHUNK), "bfloat16"),
        T.alloc_shared((3, tokens.AHEAD, tokens.PITCH), "float32"),
        T.alloc_shared((1, TM, tokens.PITCH), "float32"),
        T.alloc_shared((tokens.SPLIT, TM, tokens.TABLE), "bfloat16"),
        *(T.alloc_shared((TM,), "float32") for _ in each(3)),
        T.alloc_shared((2, tokens.AHEAD), "float32"),
        T.alloc_shared((1, TM), "float32"),
        *(T.alloc_shared((TM,), "float32") for _ in each(4)),
        T.alloc_shared((1,), "float32"),
        T.alloc_shared((3, c.parts, TM, tokens.TABLE), "bfloat16"),
        T.alloc_shared((c.parts, c.K // QUAD, 4, tokens.MATRICES), "bfloat16"),
        T.alloc_shared((c.requests,), "int32"),
        T.alloc_shared((dealing.FIELDS, dealing.UNITS), "int32"),
        T.alloc_shared((1,), "int32"),
    )


@T.macro
def _rows(c, tiles: int, ctas, cta, tx, shared, new, ring, gates, pool, requests, marks, o, scale):
    """The pieces of work of a CTA, 8 `tiles` rows a warp, with the tokens of the next on their way."""
    state_indices, cu_seqlens, cursors = requests
    NT, N, ROWS = new[0].shape[0], state_indices.shape[0], ring[0].shape[1]
    (
        KQ_s, KH_s, V_s, VH_s, F_s, gram, cross_q, cross_k, k_norm, q_norm, old_norm, decay, old_decay, beta, old_beta,
        by_q, factors, end_decay, tables, P_s, order, units, end,
    ) = shared  # fmt: skip
    rows = c.warps * 8 * tiles
    of_v = dealing.pieces_of_head(c, tiles)
    warp, lane = tx // 32, tx % 32
    r0 = warp * 8 * tiles
    state = T.alloc_local((tiles, c.K // QUAD, CHUNK), c.pool)
    raw = T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype)
    old_raw = T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype)
    x, carry = T.alloc_local((TM,), "float32"), T.alloc_local((2,), "float32")
    sums, keys = T.alloc_local((16,), "float32"), T.alloc_local((TM,), "bfloat16")
    M_h, N_h = (T.alloc_local((tokens.SPLIT * 8,), "bfloat16") for _ in each(2))
    first, count, of_unit, turns, unit, piece = (T.alloc_var("int32") for _ in each(6))
    next_unit, next_piece = T.alloc_var("int32"), T.alloc_var("int32")
    slot, part, L, folding, live, marked, must_fold, unused = (T.alloc_var("int32") for _ in each(8))
    base, fold, following, request, start = (T.alloc_var("int32") for _ in each(5))
    history_decay = T.alloc_var("float32")
    first = cta // ctas * c.requests
    count = T.min(N - first, c.requests)
    of_unit = dealing.pieces_of_unit(c, tiles, count, ctas)
    turns = (T.ceildiv(count * (c.HV * of_v) // of_unit - cta % ctas, ctas)) * of_unit
    if warp == 0:
        dealing.order_requests(c, order, first, count, state_indices, cursors, lane)
    if tx == 0:
        end[0] = T.min(T.max(cu_seqlens[N], 0), NT)
    T.sync_threads()
    dealing.share_units(
        c, units, order, first, count, of_unit, c.HV * of_v, cta % ctas, ctas, state_indices, cu_seqlens, cursors, NT,
        tx,
    )  # fmt: skip
    T.sync_threads()
    for i in each(len(raw)):
        T.clear(raw[i])
        T.clear(old_raw[i])
    unit = 0
    piece = 0
    marked = _mark(c, tiles, marks, units, 0, 0)
    _stage(c, tiles, new, ring, gates, raw, units, 0, 0, 0, KQ_s, KH_s, V_s, VH_s, tx)
    for turn in T.serial(turns):
        part = units[dealing.PIECE, unit] + piece
        h, v0 = part // of_v % c.HV, part % of_v * rows
        T.assume(v0 % rows == 0)  # so that what follows can be of 16 bytes
        slot = units[dealing.SLOT, unit]
        folding = units[dealing.TO_FOLD, unit]
        base = units[dealing.FIRST, unit]
        fold = units[dealing.FOLD_NUMBER, unit]
        # Asked before the state is loaded: the answer would share its scoreboard and come with it.
        if folding > 0 and marked != fold:
            must_fold = 1
            tokens.stage_window(ring[1], slot, base, h, v0, F_s, 0, rows, folding, c.threads, tx)
            tokens.stage_window(ring[0], slot, base, h // (c.HV // c.H), 0, F_s, TM, c.K, folding, c.threads, tx)
            T.ptx_commit_group()
            T.ptx_commit_group()  # an empty one, as in `_stage`
            if warp == 1 and lane < folding:
                old_raw[1][0] = gates[0][h]
                old_raw[2][0] = gates[1][h]
                old_raw[0][0] = ring[2][slot, tokens.in_ring(base + lane, ROWS), h]
                old_raw[0][1] = ring[3][slot, tokens.in_ring(base + lane, ROWS), h]
        else:
            must_fold = 0
        if slot >= 0:
            for i in T.unroll(tiles):
                for j in T.unroll(c.K // QUAD):
                    for e in T.vectorized(CHUNK):
                        state[i, j, e] = pool[slot, h, v0 + r0 + i * 8 + lane // 4, j * QUAD + lane % 4 * CHUNK + e]
        else:  # padding: no other slot is read, somebody might write it
            T.clear(state)
        if ctas <= c.early_up_to:
            T.pdl_trigger()
        if must_fold != 0:
            fold_in_place(
                c, tiles, state, F_s, gram, old_norm, old_decay, old_beta, end_decay, tables, P_s, x, carry, sums, keys,
                old_raw, gates, pool, marks, slot, folding, fold, h, v0, r0, warp, lane,
            )  # fmt: skip
        else:  # TileLang makes one branch of an `if` that has an `else`, and of another one for each statement
            T.ptx_wait_group(1)
        T.sync_threads()
        L = units[dealing.TOKENS, unit]
        live = units[dealing.HISTORY, unit]
        following = tokens.in_ring(base + folding, ROWS) + live  # row of the ring for the first new token
        if warp == 3 and lane < TM:
            steps.share_gates((0, 0, 0, 0, gates[2]), *raw, True, decay, T.view(beta, (1, TM)), 0, lane, lane < L)
            decay[1, lane + 1] = decay[0, lane]
            if lane == 0:
                decay[1, 0] = 1.0
            if v0 == 0 and lane < L and slot >= 0:
                ring[2][slot, _wrapped(following + lane, ROWS), h] = raw[0][0]
                ring[3][slot, _wrapped(following + lane, ROWS), h] = raw[0][1]
        if warp == 2 and lane < TM:
            steps.share_gates(
                (0, 0, 0, 0, gates[2]), *raw, True, old_decay, T.view(old_beta, (1, TM)), 0, lane, lane < live
            )  # fmt: skip
        if piece == 0 or folding > 0:
            _share_products(
                c, KQ_s, unit % 2 * 2 * TM, KH_s, unit % 2 * TM, gram, cross_q, cross_k, k_norm, q_norm,
                old_norm, sums, scale, warp, lane,
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
        elif warp == 1:
            if live <= 8:
                tokens.updates_of_values(gram, OLD_KEYS, old_norm, old_decay, old_beta, end_decay, x, carry, 8, lane)
            else:
                tokens.updates_of_values(gram, OLD_KEYS, old_norm, old_decay, old_beta, end_decay, x, carry, 16, lane)
            if lane < TM:
                factors[lane] = carry[tokens.DECAY]
                tokens.share_column(x, tables, tokens.OF_HISTORY, lane, tokens.SPLIT)
        T.sync_threads()
        next_piece = T.Select(piece + 1 == of_unit, 0, piece + 1)
        next_unit = T.Select(piece + 1 == of_unit, unit + 1, unit)
        marked = 0
        if turn + 1 < turns:
            marked = _mark(c, tiles, marks, units, next_unit, next_piece)
            _stage(
                c, tiles, new, ring, gates, raw, units, next_unit, next_piece, (turn + 1) % 2, KQ_s, KH_s, V_s, VH_s, tx
            )  # fmt: skip
        else:
            T.ptx_commit_group()
        operands.behind_history(tables, cross_q, cross_k, by_q, factors, M_h, N_h, lane)
        history_decay = end_decay[0]
        operands.share_operand(
            KQ_s, unit % 2 * 2 * TM, tables, by_q, P_s, c.K, c.warps, warp, lane,
            (N_h, KH_s, unit % 2 * TM, history_decay),
        )  # fmt: skip
        T.sync_threads()
        start = units[dealing.START, unit]
        request = units[dealing.REQUEST, unit]
        _keep(
            c, tiles, ring, KQ_s, unit % 2 * 2 * TM, V_s, turn % 2 * TM, T.max(slot, 0), following,
            T.Select(slot >= 0, L, 0), h, v0, r0, tx,
        )  # fmt: skip
        store_outputs(
            c, tiles, state, P_s, tables, V_s, turn % 2 * TM, o, slot >= 0, start, L, h, v0, r0, lane,
            (M_h, VH_s, turn % 2 * TM),
        )  # fmt: skip
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        unused = end[0] + request
        while unused < NT:
            if lane < 8 * tiles:
                o[unused, h, v0 + r0 + lane] = T.bfloat16(0)
            unused = unused + N
        unit = next_unit
        piece = next_piece
    T.pdl_trigger()


def _mark(c, tiles: int, marks, units, unit, piece):
    """The last fold of a piece of work; any number if it has nothing to fold. Loaded a piece ahead."""
    part = units[dealing.PIECE, unit] + piece
    of_v = dealing.pieces_of_head(c, tiles)
    row = part % of_v * (c.warps * 8 * tiles // c.marked)
    return T.if_then_else(
        units[dealing.TO_FOLD, unit] > 0, marks[T.max(units[dealing.SLOT, unit], 0), part // of_v % c.HV, row], 0
    )


def _wrapped(row, ROWS):
    """Row `row` < 3 ROWS of a ring."""
    return tokens.in_ring(tokens.in_ring(row, ROWS), ROWS)


@T.macro
def _stage(c, tiles: int, new, ring, gates, raw, units, unit, piece, values, KQ_s, KH_s, V_s, VH_s, tx):
    """Start loading the tokens of a piece of work and of its history, those of a key head with the first piece that has
    it; and the gates, of new tokens in warp 3, of the history in warp 2."""
    NT, ROWS, lane = new[0].shape[0], ring[0].shape[1], tx % 32
    of_v, rows = dealing.pieces_of_head(c, tiles), c.warps * 8 * tiles
    slot, start, L, live, part, history = (T.alloc_var("int32") for _ in each(6))
    slot = T.max(units[dealing.SLOT, unit], 0)
    start = units[dealing.START, unit]
    L = units[dealing.TOKENS, unit]
    live = units[dealing.HISTORY, unit]
    history = tokens.in_ring(units[dealing.FIRST, unit] + units[dealing.TO_FOLD, unit], ROWS)
    part = units[dealing.PIECE, unit] + piece
    h, v0 = part // of_v % c.HV, part % of_v * rows
    if piece == 0:
        tokens.stage_rows(new[1], start, h // (c.HV // c.H), 0, KQ_s, unit % 2 * 2 * TM, c.K, L, c.threads, tx)
        tokens.stage_rows(new[0], start, h // (c.HV // c.H), 0, KQ_s, unit % 2 * 2 * TM + TM, c.K, L, c.threads, tx)
        tokens.stage_window(
            ring[0], slot, history, h // (c.HV // c.H), 0, KH_s, unit % 2 * TM, c.K, live, c.threads, tx
        )  # fmt: skip
    tokens.stage_rows(new[2], start, h, v0, V_s, values * TM, rows, L, c.threads, tx)
    tokens.stage_window(ring[1], slot, history, h, v0, VH_s, values * TM, rows, live, c.threads, tx)
    T.ptx_commit_group()
    T.ptx_commit_group()  # an empty one, so that the wait can leave one: a wait for all is behind the state's loads
    if tx // 32 == 3:
        raw[1][0] = gates[0][h]
        raw[2][0] = gates[1][h]
        raw[0][0] = new[3][tokens.nearest_token(start, lane, NT), h]
        raw[0][1] = new[4][tokens.nearest_token(start, lane, NT), h]
    elif tx // 32 == 2:
        raw[1][0] = gates[0][h]
        raw[2][0] = gates[1][h]
        if lane < live:
            raw[0][0] = ring[2][slot, tokens.in_ring(history + lane, ROWS), h]
            raw[0][1] = ring[3][slot, tokens.in_ring(history + lane, ROWS), h]


@T.macro
def _share_products(
    c, KQ_s, row0, KH_s, old0, gram, cross_q, cross_k, k_norm, q_norm, old_norm, sums, scale, warp, lane
):  # fmt: skip
    """Two products of 16 tokens with 16 others a warp, the norms from diagonals."""
    if warp == 0:
        tokens.multiply(KQ_s, row0, row0, sums, c.K, lane)
        tokens.share_product(sums, gram, NEW_KEYS, lane)
        tokens.share_norms(sums, k_norm, 1.0, c.l2norm, lane)
    elif warp == 1:
        tokens.multiply(KQ_s, row0, row0 + TM, sums, c.K, lane)
        tokens.share_product(sums, gram, NEW_QUERIES, lane)
    elif warp == 2:
        tokens.multiply(KQ_s, row0 + TM, row0 + TM, sums, c.K, lane)
        tokens.share_norms(sums, q_norm, scale, c.l2norm, lane)
    else:
        tokens.multiply(KH_s, old0, old0, sums, c.K, lane)
        tokens.share_product(sums, gram, OLD_KEYS, lane)
        tokens.share_norms(sums, old_norm, 1.0, c.l2norm, lane)
    if warp == 0:
        tokens.multiply_two(KQ_s, row0 + TM, KH_s, old0, sums, c.K, lane)
        tokens.share_product(sums, cross_q, 0, lane)
    elif warp == 1:
        tokens.multiply_two(KH_s, old0, KQ_s, row0, sums, c.K, lane)
        tokens.share_parts(sums, cross_k, lane)


@T.macro
def _keep(c, tiles: int, ring, KQ_s, keys, V_s, values, slot, first, L, h, v0, r0, tx):
    """The new keys and values of a piece of work to the ring; a key head's keys by the first piece that has it."""
    ROWS, lane = ring[0].shape[1], tx % 32
    row = T.alloc_var("int32")  # of 32 bits; in an index it would be worked out in 64
    if v0 == 0 and h % (c.HV // c.H) == 0:
        for i in T.unroll(TM * c.K // CHUNK // c.threads):
            t, col = (i * c.threads + tx) // (c.K // CHUNK), (i * c.threads + tx) % (c.K // CHUNK) * CHUNK
            row = _wrapped(first + t, ROWS)
            if t < L:
                for e in T.vectorized(CHUNK):
                    ring[0][slot, row, h // (c.HV // c.H), col + e] = KQ_s[keys + t, col + e]
    for i in T.unroll(T.ceildiv(TM * tiles, 32)):
        # names of their own: TileLang before 0.1.15 takes them for those of the loop above
        t_v, col_v = (i * 32 + lane) // tiles, (i * 32 + lane) % tiles * CHUNK
        row = _wrapped(first + t_v, ROWS)
        if t_v < L:
            for e in T.vectorized(CHUNK):
                ring[1][slot, row, h, v0 + r0 + col_v + e] = V_s[values + t_v, r0 + col_v + e]
