"""The gated delta rule token by token on dense fp32 states, [K, V] or [V, K]: FLA's recurrent decode.

    d = e^g;  u = beta (v - d S^T k);  o = d S^T q + u (k . q);  S = d S + k u^T        S [K, V], not rounded

Both products of a token read the old state and the raw k and q; norms and scale are factors of the sums:

    r = rsqrt(k . k + 1e-6);  z = rsqrt(q . q + 1e-6) scale        (without the norm 1 and scale)
    u = beta (v - d r (S^T k));  w = u r;  o = z (d (S^T q) + w (k . q));  S = d S + k w^T

so a token costs one round of reductions. A warp works alone: no shared memory, no barrier. It owns all K rows of `BV`
columns of one value head of one request. Lane (g, c) = (lane // C, lane % C) with C = BV / 4 holds four of the columns,
4 c to 4 c + 3, of K / groups rows, in chunks of contiguous ones: k and q come as vectors straight from global memory.
Sums over the lanes g: two exchanges leave each lane one column of both products, the rest are butterflies. Then lane l
has column `own` = 4 (l % C) + l // 8, computes its u and o, and u goes back to the lanes of that column.

[K, V] and [V, K] differ only in how a lane's part of the state is loaded and stored, 16 bytes at a time: four columns
of a row, or four rows of a column. k, q, v and the gates of a token are loaded one token ahead, the first ones with the
state.

`head_batch` heads of one key head lie in the warps of one CTA: what they share is L1, which then serves k and q.

While requests are few, a warp owns `few_BV` columns, so that there are enough warps; both tiles are in one program.

Registers: at most 128; of these 64 of state at BV = 16.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
import dataclasses
from typing import Any

import tilelang.language as T

from kernels.decode.dense_config import Config
from kernels.steps import L2NORM_EPS

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_thread_storage_sync": True,  # warps share nothing
    "tl.disable_safe_memory_legalize": True,  # every index is clamped here
}
COLS = 4  # state columns of a lane
WIDE = 4  # fp32 elements of a 16-byte access
G, BETA = 0, 1  # of a token's gates


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, g, beta, o, before, after, lengths, scale, without before, after or lengths (seqlens, cu_seqlens) where the
    configuration has none. g, beta: fp32.
    """
    QT, KT, VT, GT, BT, OT, BeforeT, AfterT, LengthsT = _types(c)

    @T.prim_func
    def dense(
        q: QT, k: KT, v: VT, g: GT, beta: BT, o: OT,
        before: BeforeT, after: AfterT, lengths: LengthsT, scale: T.float32,
    ):  # fmt: skip
        _body(c, q, k, v, g, beta, o, before, after, lengths, scale)

    return dense


def _types(c: Config) -> tuple[Any, ...]:
    """Of the parameters; None takes one out of the signature. Sizes and strides are symbols."""
    B, NT, N, NI = (T.dynamic(name) for name in ("B", "NT", "N", "NI"))
    requests = N if c.lengths == "cu_seqlens" else B

    def tokens(name: str, *inner: int, dtype: str) -> Any:
        strides = tuple(T.dynamic(f"{name}{axis}") for axis in ("b", "t", "h"))
        return T.StridedTensor((B, NT, *inner), (*strides, 1)[: 2 + len(inner)], dtype)

    def state(name: str) -> Any:
        inner = (c.V, c.K) if c.v_first else (c.K, c.V)
        strides = (T.dynamic(f"{name}n"), T.dynamic(f"{name}h"), inner[1], 1)
        return T.StridedTensor((requests, c.HV, *inner), strides, "float32")

    index = {"all": None, "seqlens": (B,), "cu_seqlens": (NI,)}[c.lengths]
    return (
        tokens("q", c.H, c.K, dtype=c.dtype),
        tokens("k", c.H, c.K, dtype=c.dtype),
        tokens("v", c.HV, c.V, dtype=c.dtype),
        tokens("g", c.HV, dtype="float32"),
        tokens("beta", c.HV, dtype="float32"),
        tokens("o", c.HV, c.V, dtype=c.dtype),
        state("before_") if c.has_initial else None,
        state("after_") if c.stores_final else None,
        None if index is None else T.Tensor(index, c.index),
    )


@T.macro
def _body(c, q, k, v, g, beta, o, before, after, lengths, scale):
    N = lengths.shape[0] - 1 if c.lengths == "cu_seqlens" else q.shape[0]
    few = dataclasses.replace(c, BV=c.few_BV)
    is_small = N * few.HV * (few.V // few.BV) <= c.few_up_to  # noqa: SIM300
    heads = c.HV // c.head_batch
    with T.Kernel(N * heads * T.if_then_else(is_small, few.tiles, c.tiles), threads=32 * c.warps) as cta:
        _assume_wide(c, q, k, v, o, before, after)
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        if is_small:
            _tile(few, cta, tx, q, k, v, g, beta, o, before, after, lengths, scale)
        else:
            _tile(c, cta, tx, q, k, v, g, beta, o, before, after, lengths, scale)


@T.macro
def _tile(c, cta, tx, q, k, v, g, beta, o, before, after, lengths, scale):
    """What this warp does: one request, one head, BV columns."""
    NT = q.shape[1]
    packed = c.lengths == "cu_seqlens"
    warp, lane = tx // 32, tx % 32
    h = cta // c.tiles % (c.HV // c.head_batch) * c.head_batch + warp % c.head_batch
    v0 = (cta % c.tiles * (c.warps // c.head_batch) + warp // c.head_batch) * c.BV
    n = cta // (c.HV // c.head_batch * c.tiles)
    row = 0 if packed else n
    start = T.alloc_var("int32")
    length = T.alloc_var("int32")
    start = 0
    length = NT
    if c.lengths == "seqlens":
        length = T.max(T.min(lengths[n], NT), 0)
    if packed:
        start = T.cast(T.min(T.max(lengths[n], 0), NT), "int32")
        length = T.cast(T.min(T.max(lengths[n + 1], 0), NT), "int32") - start
    _request(c, q, k, v, g, beta, o, before, after, n, row, start, length, scale, h, v0, lane)
    _clear_rest(c, o, lengths, n, row, length, h, v0, lane)


@T.macro
def _assume_wide(c, q, k, v, o, before, after):
    """Tell the compiler what the API has checked: strides allow 16-byte accesses."""
    for axis in (0, 1, 2):
        T.assume(q.strides[axis] % 8 == 0)
        T.assume(k.strides[axis] % 8 == 0)
        T.assume(v.strides[axis] % 8 == 0)
        T.assume(o.strides[axis] % 8 == 0)
    for axis in (0, 1):
        if c.has_initial:
            T.assume(before.strides[axis] % WIDE == 0)
        if c.stores_final:
            T.assume(after.strides[axis] % WIDE == 0)


@T.macro
def _clear_rest(c, o, lengths, n, row, length, h, v0, lane):
    """Rows of o of no request are zero; of packed tokens request n clears every N-th of those after the last."""
    NT = o.shape[1]
    if c.lengths == "seqlens":
        for i in T.serial(NT - length):
            if lane < c.BV:
                o[row, length + i, h, v0 + lane] = T.cast(0, c.dtype)
    if c.lengths == "cu_seqlens":
        N = lengths.shape[0] - 1
        end = T.alloc_var("int32")
        end = T.cast(T.min(T.max(lengths[N], 0), NT), "int32")
        for i in T.serial(T.max(T.ceildiv(NT - end - n, N), 0)):
            if lane < c.BV:
                o[row, end + n + i * N, h, v0 + lane] = T.cast(0, c.dtype)


@T.macro
def _request(c, q, k, v, g, beta, o, before, after, n, row, start, length, scale, h, v0, lane):
    """All tokens of one request for BV columns of one value head."""
    S = T.alloc_local((c.rows * COLS,), "float32")
    raw_k, raw_q = T.alloc_local((c.rows,), c.dtype), T.alloc_local((c.rows,), c.dtype)
    key, query = T.alloc_local((c.rows,), "float32"), T.alloc_local((c.rows,), "float32")
    raw_v = T.alloc_local((1,), c.dtype)
    gates = T.alloc_local((2,), "float32")
    hk = h // (c.HV // c.H)
    own = lane % (c.BV // COLS) * COLS + lane // 8
    # A load returns after those issued before it: nothing small goes behind the state, unless its address has to wait.
    if c.lengths == "cu_seqlens":
        _load_state(c, before, S, n, h, v0, lane)
        if length > 0:
            _load_token(c, q, k, v, g, beta, row, start, hk, h, v0 + own, raw_k, raw_q, raw_v, gates, lane)
    else:
        _load_token(c, q, k, v, g, beta, row, 0, hk, h, v0 + own, raw_k, raw_q, raw_v, gates, lane)
        _load_state(c, before, S, n, h, v0, lane)
    T.pdl_trigger()
    for t in T.serial(length):
        value = T.alloc_var("float32")
        decay = T.alloc_var("float32")
        rate = T.alloc_var("float32")
        for i in T.unroll(c.rows):
            key[i] = T.cast(raw_k[i], "float32")
            query[i] = T.cast(raw_q[i], "float32")
        value = T.cast(raw_v[0], "float32")
        decay = T.exp(gates[G])
        rate = gates[BETA]
        if t + 1 < length:
            _load_token(c, q, k, v, g, beta, row, start + t + 1, hk, h, v0 + own, raw_k, raw_q, raw_v, gates, lane)
        _apply_token(c, S, key, query, value, decay, rate, scale, o, row, start + t, h, v0 + own, lane)
    if c.stores_final:
        _store_state(c, S, after, n, h, v0, lane)


def _chunk(c) -> int:
    """Contiguous rows of a lane: 16 bytes of k and q, or of a state column where that is how it lies in memory."""
    return WIDE if c.v_first else 8


def _at(c, i: int, j: int) -> int:
    """Where a lane keeps row i, column j of its part of the state: four of one access are neighbours."""
    return j * c.rows + i if c.v_first else i * COLS + j


@T.macro
def _load_token(c, q, k, v, g, beta, row, t, hk, h, col, raw_k, raw_q, raw_v, gates, lane):
    """Raw k and q of this lane's rows, v of its own column, g and beta: all loads in flight, none waited for."""
    chunk, group = _chunk(c), lane // (c.BV // COLS)
    gates[G] = g[row, t, h]
    gates[BETA] = beta[row, t, h]
    for p in T.unroll(c.rows // chunk):
        for e in T.vectorized(chunk):
            raw_k[p * chunk + e] = k[row, t, hk, (p * c.groups + group) * chunk + e]
        for e in T.vectorized(chunk):
            raw_q[p * chunk + e] = q[row, t, hk, (p * c.groups + group) * chunk + e]
    raw_v[0] = v[row, t, h, col]


@T.macro
def _load_state(c, before, S, n, h, v0, lane):
    chunk, group, c0 = _chunk(c), lane // (c.BV // COLS), v0 + lane % (c.BV // COLS) * COLS
    if not c.has_initial:
        T.clear(S)
    elif c.v_first:
        for j in T.unroll(COLS):
            for p in T.unroll(c.rows // chunk):
                for e in T.vectorized(WIDE):
                    S[_at(c, p * chunk, j) + e] = before[n, h, c0 + j, (p * c.groups + group) * chunk + e]
    else:
        for p in T.unroll(c.rows // chunk):
            for i in T.unroll(chunk):
                for e in T.vectorized(WIDE):
                    S[_at(c, p * chunk + i, 0) + e] = before[n, h, (p * c.groups + group) * chunk + i, c0 + e]


@T.macro
def _store_state(c, S, after, n, h, v0, lane):
    chunk, group, c0 = _chunk(c), lane // (c.BV // COLS), v0 + lane % (c.BV // COLS) * COLS
    if c.v_first:
        for j in T.unroll(COLS):
            for p in T.unroll(c.rows // chunk):
                for e in T.vectorized(WIDE):
                    after[n, h, c0 + j, (p * c.groups + group) * chunk + e] = S[_at(c, p * chunk, j) + e]
    else:
        for p in T.unroll(c.rows // chunk):
            for i in T.unroll(chunk):
                for e in T.vectorized(WIDE):
                    after[n, h, (p * c.groups + group) * chunk + i, c0 + e] = S[_at(c, p * chunk + i, 0) + e]


@T.macro
def _apply_token(c, S, key, query, value, decay, rate, scale, o, row, t, h, col, lane):
    """One token: S becomes the next state, o[row, t, h, col] the output."""
    sk, sq = T.alloc_local((COLS,), "float32"), T.alloc_local((COLS,), "float32")
    sums = T.alloc_local((3,), "float32")  # k . q, k . k, q . q
    own = T.alloc_local((1,), "float32")
    w = T.alloc_local((COLS,), "float32")
    count = 3 if c.l2norm else 1
    for j in T.unroll(COLS):
        sk[j] = S[_at(c, 0, j)] * key[0]
        sq[j] = S[_at(c, 0, j)] * query[0]
    sums[0] = key[0] * query[0]
    if c.l2norm:
        sums[1] = key[0] * key[0]
        sums[2] = query[0] * query[0]
    for i in T.unroll(1, c.rows):
        for j in T.unroll(COLS):
            sk[j] = S[_at(c, i, j)] * key[i] + sk[j]
            sq[j] = S[_at(c, i, j)] * query[i] + sq[j]
        sums[0] = key[i] * query[i] + sums[0]
        if c.l2norm:
            sums[1] = key[i] * key[i] + sums[1]
            sums[2] = query[i] * query[i] + sums[2]
    _scatter(c, sk, lane)
    _scatter(c, sq, lane)
    for distance in _distances(c, 16):
        for i in T.unroll(count):
            sums[i] = sums[i] + T.shfl_xor(sums[i], distance)
    k_norm, q_norm = T.alloc_var("float32"), T.alloc_var("float32")
    k_norm = 1.0
    q_norm = scale
    if c.l2norm:
        k_norm = T.rsqrt(sums[1] + L2NORM_EPS)
        q_norm = T.rsqrt(sums[2] + L2NORM_EPS) * scale
    own[0] = rate * (value - decay * (k_norm * sk[0])) * k_norm
    if lane % 8 < c.BV // COLS:  # the other lanes have the same columns
        o[row, t, h, col] = T.cast(q_norm * (decay * sq[0] + own[0] * sums[0]), c.dtype)
    for j in T.unroll(COLS):
        w[j] = T.shfl_sync(own[0], lane % 8 + 8 * j)
    for i in T.unroll(c.rows):
        for j in T.unroll(COLS):
            S[_at(c, i, j)] = decay * S[_at(c, i, j)] + w[j] * key[i]


def _distances(c, largest: int) -> tuple[int, ...]:
    """Between lanes that hold other rows of the same columns."""
    return tuple(d for d in (16, 8, 4, 2, 1) if c.BV // COLS <= d <= largest)


@T.macro
def _scatter(c, x, lane):
    """x[0] = the sum over the lanes of these columns of x[lane // 8]."""
    for half, distance in ((2, 16), (1, 8)):
        for j in T.unroll(half):
            kept = T.alloc_var("float32")
            sent = T.alloc_var("float32")
            kept = T.Select(lane // distance % 2 == 0, x[j], x[half + j])
            sent = T.Select(lane // distance % 2 == 0, x[half + j], x[j])
            x[j] = kept + T.shfl_xor(sent, distance)
    for distance in _distances(c, 4):
        x[0] = x[0] + T.shfl_xor(x[0], distance)
