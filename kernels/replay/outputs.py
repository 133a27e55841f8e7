"""Verify without per-token states: outputs only, the pool is read and not written; at most 16 tokens a request.

    o = P S_0^T + M V,   P = diag(e^G) Q + N K,   N = -M diag(e^G)        (specs/design/replay.md)

M and P are small and made once a head (kernels/replay/tokens.py); the state goes from memory straight to the registers
in which it is an operand of the tensor cores, and meets nothing but P.

A piece of work is 32 * `tiles` rows of one value head of one request; a warp owns 8 * `tiles` of them, 64 registers of
state. A CTA goes through several pieces, with the tokens of the next one on their way. Shared memory holds k, q and v
twice, a few tables of [16, 16], and P as fragments. Barriers of a piece:

    tokens are there    all warps: products of the tokens with each other; warp 3: gates
    products are there  warp 0: M and N
    M, N are there      all warps: P, 32 columns each; copies of the next tokens are started
    P is there          each warp alone: outputs of its rows

Loads are issued in the order in which they are needed. Few requests have one tile a warp, so that the state comes from
more SMs; both forms are in one program. Registers: at most 168. Shared memory: 43 KiB.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.replay import tokens
from kernels.replay.config import Config
from kernels.steps import bf16_part
from kernels.tile import TM
from kernels.verify import signature
from kernels.verify.config import PARTS
from kernels.warp import CHUNK, QUAD, mma

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
    "tl.disable_thread_storage_sync": True,  # the barriers are where the steps say
}
WIDTHS = ((4, 0), (8, 4), (12, 8), (16, 12))  # M for at most so many tokens, and more than


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
            _rows(c, c.few_tiles, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale)
        else:
            _rows(c, c.tiles, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale)


def _shared(c):
    """k and q, v (both of two pieces of work), gram, k_norm, q_norm, decay, beta, M, N, by_q, P."""
    rows = c.warps * 8 * max(c.tiles, c.few_tiles)
    return (
        T.alloc_shared((2 * 2 * TM, c.K + QUAD), "bfloat16"),  # padded: a quarter warp reads 2 rows without conflicts
        T.alloc_shared((2 * TM, rows + 16), "bfloat16"),  # padded: so that four tokens are read without conflicts
        T.alloc_shared((2, tokens.AHEAD, tokens.PITCH), "float32"),
        *(T.alloc_shared((tokens.AHEAD,), "float32") for _ in range(4)),
        *(T.alloc_shared((TM, tokens.PITCH), "float32") for _ in range(2)),
        T.alloc_shared((TM,), "float32"),
        T.alloc_shared((c.K // TM, 2, 32, 8), "bfloat16"),
    )


@T.macro
def _rows(c, tiles: int, cta, tx, shared, q, k, v, gates, pool, state_indices, cu_seqlens, o, scale):
    """Every `ctas`-th piece of work from `cta` on, 8 `tiles` rows a warp, with the tokens of the next on their way."""
    NT, N, SLOTS = q.shape[0], state_indices.shape[0], pool.shape[0]
    KQ_s, V_s, gram, k_norm, q_norm, decay, beta, M_s, N_s, by_q, P_s = shared
    rows = c.warps * 8 * tiles
    of_v = c.V // rows
    items = _items(c, N, tiles)
    warp, lane = tx // 32, tx % 32
    g, quad = lane // 4, lane % 4
    r0 = warp * 8 * tiles
    state = T.alloc_local((tiles, c.K // QUAD, CHUNK), c.pool)
    raw = T.alloc_local((2,), c.gate_dtype), T.alloc_local((1,), "float32"), T.alloc_local((1,), c.bias_dtype)
    x, carry = T.alloc_local((TM,), "float32"), T.alloc_local((2,), "float32")
    slot, start, L = (T.alloc_var("int32") for _ in range(3))
    next_slot, next_start, next_L = (T.alloc_var("int32") for _ in range(3))
    nearest, end, unused, ahead = (T.alloc_var("int32") for _ in range(4))
    end = T.min(T.max(cu_seqlens[N], 0), NT)
    slot = state_indices[cta // (c.HV * of_v)]
    start = T.max(cu_seqlens[cta // (c.HV * of_v)], 0)
    L = T.min(T.min(cu_seqlens[cta // (c.HV * of_v) + 1], NT) - start, TM)
    _stage(c, rows, q, k, v, KQ_s, V_s, 0, start, L, cta // of_v % c.HV, cta % of_v * rows, tx)
    for turn in T.serial(T.ceildiv(items - cta, c.ctas)):
        at = cta + turn * c.ctas
        buffer = turn % 2
        n, h, v0 = at // (c.HV * of_v), at // of_v % c.HV, at % of_v * rows
        # Loads in the order in which they are waited for: a load returns after those that the SM issued before it.
        ahead = T.min(at + c.ctas, items - 1)
        next_slot = state_indices[ahead // (c.HV * of_v)]
        next_start = T.max(cu_seqlens[ahead // (c.HV * of_v)], 0)
        next_L = T.min(T.min(cu_seqlens[ahead // (c.HV * of_v) + 1], NT) - next_start, TM)
        # Else they would be carried from one piece of work to the next, in registers that are not there.
        for i in tuple(range(len(raw))):
            T.clear(raw[i])
        if warp == 3:
            steps.load_raw_gates(*gates, *raw, T.max(T.min(start + lane % TM, NT - 1), 0), h)
        nearest = T.max(T.min(slot, SLOTS - 1), 0)
        for i in T.unroll(tiles):
            for j in T.unroll(c.K // QUAD):
                for e in T.vectorized(CHUNK):
                    state[i, j, e] = pool[
                        nearest, h, v0 + r0 + g // 2 * (2 * tiles) + i * 2 + g % 2, j * QUAD + quad * CHUNK + e
                    ]
        T.pdl_trigger()
        T.ptx_wait_group(0)
        T.sync_threads()
        if warp == 3 and lane < TM:
            steps.share_gates(
                gates, *raw, True, T.view(decay, (1, tokens.AHEAD)), T.view(beta, (1, tokens.AHEAD)), 0, lane,
                lane < L,
            )  # fmt: skip
        tokens.share_products(KQ_s, buffer * 2 * TM, gram, k_norm, q_norm, scale, c.l2norm, L, c.K, warp, g, quad)
        T.sync_threads()
        T.clear(x)
        carry[tokens.BEHIND] = 0.0
        carry[tokens.DECAY] = 1.0
        if warp == 0:
            for width, above in WIDTHS:
                if L > above and L <= width:  # noqa: SIM300
                    tokens.share_outputs_of_values(
                        gram, k_norm, q_norm, decay, beta, M_s, N_s, by_q, x, carry, width, lane
                    )
        T.sync_threads()
        for two_tiles in (False, True):
            if (L > TM // 2) == two_tiles:
                tokens.share_operand(
                    KQ_s, buffer * 2 * TM, N_s, by_q, P_s, two_tiles, c.K, c.warps, warp, lane, g, quad
                )
        if turn + 1 < T.ceildiv(items - cta, c.ctas):
            _stage(
                c, rows, q, k, v, KQ_s, V_s, 1 - buffer, next_start, next_L, ahead // of_v % c.HV,
                ahead % of_v * rows, tx,
            )  # fmt: skip
        T.sync_threads()
        for two_tiles in (False, True):
            if (L > TM // 2) == two_tiles:
                _outputs(
                    c, tiles, two_tiles, state, P_s, M_s, V_s, buffer, o, slot >= 0 and slot < SLOTS, start, L, h,
                    v0, r0, lane, g, quad,
                )  # fmt: skip
        # Rows of o that belong to no request are zero: request n clears every N-th of them.
        unused = end + n
        while unused < NT:
            if lane < 8 * tiles:
                o[unused, h, v0 + r0 + lane] = T.bfloat16(0)
            unused = unused + N
        slot = next_slot
        start = next_start
        L = next_L


@T.macro
def _stage(c, rows: int, q, k, v, KQ_s, V_s, buffer, start, L, h, v0, tx):
    """Start loading the tokens of a piece of work."""
    head = h // (c.HV // c.H)
    steps.stage_tokens(k, KQ_s, buffer * 2 * TM, start, head, L, c.K, c.threads, tx)
    steps.stage_tokens(q, KQ_s, buffer * 2 * TM + TM, start, head, L, c.K, c.threads, tx)
    for i in T.unroll(T.ceildiv(TM * rows // CHUNK, c.threads)):
        piece = i * c.threads + tx
        if piece < TM * rows // CHUNK:
            t, col = piece // (rows // CHUNK), piece % (rows // CHUNK) * CHUNK
            steps.stage_chunk(v, start + t, h, v0 + col, V_s, buffer * TM + t, col, t < L)
    T.ptx_commit_group()


@T.macro
def _outputs(c, tiles: int, two: bool, state, P_s, M_s, V_s, buffer, o, present, start, L, h, v0, r0, lane, g, quad):
    """o = P S_0^T + M V for the rows of this warp."""
    A = T.alloc_local((16,), "bfloat16")
    part = T.alloc_local((CHUNK,), "bfloat16")
    v_rows, values = T.alloc_local((4, 2 * tiles), "bfloat16"), T.alloc_local((4,), "bfloat16")
    sums = T.alloc_local((tiles * 4,), "float32")
    out = T.alloc_local((2, 2 * tiles), "bfloat16")
    T.clear(sums)
    tokens.parts_of_table(M_s, A, two, g, quad)
    for p in tuple(range(4 if two else 2)):
        for e in T.vectorized(2 * tiles):
            v_rows[p, e] = V_s[buffer * TM + tokens.token_of(p, quad), r0 + g // 2 * (2 * tiles) + e]
    for i in T.unroll(tiles):
        for p in tuple(range(4)):
            if two or p < 2:
                values[p] = T.Select(g % 2 == 0, v_rows[p, i * 2], v_rows[p, i * 2 + 1])
            else:
                values[p] = T.bfloat16(0)
        mma(A, 0, values, 0, sums, i * 4)
        if two:
            mma(A, 8, values, 0, sums, i * 4)
    for j in T.unroll(c.K // QUAD):
        for half in T.unroll(2):
            for piece in T.unroll(2 if two else 1):
                for e in T.vectorized(8):
                    A[piece * 8 + e] = P_s[j * 2 + half, piece, lane, e]
            for i in T.unroll(tiles):
                for p in tuple(range(PARTS[c.pool])):
                    for e in T.unroll(4):
                        part[e] = bf16_part(state[i, j, half * 4 + e], p)
                    mma(A, 0, part, 0, sums, i * 4)
                    if two:
                        mma(A, 8, part, 0, sums, i * 4)
    for i in T.unroll(tiles):
        for e in T.unroll(2):
            if two:
                out[0, i * 2 + e] = _kept(sums[i * 4 + e], present)
                out[1, i * 2 + e] = _kept(sums[i * 4 + 2 + e], present)
            else:  # the two parts of the same rows
                out[0, i * 2 + e] = _kept(sums[i * 4 + e] + sums[i * 4 + 2 + e], present)
    for t in T.unroll(2 if two else 1):
        if t * 8 + g < L:
            for e in T.vectorized(2 * tiles):
                o[start + t * 8 + g, h, v0 + r0 + quad * (2 * tiles) + e] = out[t, e]


def _kept(x, present):
    return T.Select(present, T.cast(x, "bfloat16"), T.bfloat16(0))
