"""Decode: one token per request, on the states of a paged V-major pool, in place or from one slot to another.

    d = e^g;  u = beta (v - d S k);  o = d S q + u (k . q);  S = d S + u k^T

Both products read the old state, so there is one round of reductions. Each warp owns 32 / `lanes` * `rows` rows of one
value head of one request, loads and normalises q and k itself, and holds its rows in registers, `lanes` neighbouring
lanes a row; there is no shared memory and no barrier (kernels/lone_warps.py).

The arithmetic is fixed in kernels/recurrent_steps.py: T calls have the bits of one lossless verify of T tokens.

Registers: at most 128.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import lone_warps, steps
from kernels import recurrent_steps as token
from kernels.decode.config import Config
from kernels.recurrent_steps import CHUNK

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
}


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, a, b, A_log, dt_bias, pool, read_indices, write_indices, o, scale, beta_scale;
    `packed` has mixed_qkv in place of q, k, v; without `moves` there is no write_indices.
    """
    QT, KT, VT, MixedT, AT, BT, AlogT, BiasT, PoolT, ReadT, WriteT, OT = _types(c)

    @T.prim_func
    def decode(
        mixed: MixedT, q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
        pool: PoolT, read: ReadT, write: WriteT, o: OT, scale: T.float32, beta_scale: T.float32,
    ):  # fmt: skip
        _assume_wide(c, mixed, q, k, v)
        qkv = lone_warps.packed(c, mixed) if c.packed else lone_warps.separate(q, k, v)
        _body(c, qkv, (a, b, A_log, dt_bias, beta_scale), pool, read, write if c.moves else read, o, scale)

    return decode.with_attr("global_symbol", "decode" + "_packed" * c.packed + "_moves" * c.moves)


def _types(c: Config) -> tuple[Any, ...]:
    """Of the parameters; None takes one out of the signature. Sizes and pitches are symbols."""
    N, SLOTS = T.dynamic("N"), T.dynamic("SLOTS")
    ldq, ldk, ldv, ldo, ldp = (T.dynamic(f"ld{x}") for x in ("q", "k", "v", "o", "p"))
    lda, ldb, la, lb = (T.dynamic(name) for name in ("lda", "ldb", "la", "lb"))
    return (
        None if c.packed else T.StridedTensor((N, c.H, c.K), (ldq, c.K, 1), "bfloat16"),
        None if c.packed else T.StridedTensor((N, c.H, c.K), (ldk, c.K, 1), "bfloat16"),
        None if c.packed else T.StridedTensor((N, c.HV, c.V), (ldv, c.V, 1), "bfloat16"),
        T.StridedTensor((N, 2 * c.H * c.K + c.HV * c.V), (ldq, 1), "bfloat16") if c.packed else None,
        T.StridedTensor((N, c.HV), (lda, la), c.gate_dtype),
        T.StridedTensor((N, c.HV), (ldb, lb), c.gate_dtype),
        T.Tensor((c.HV,), "float32"),
        T.Tensor((c.HV,), c.bias_dtype),
        T.StridedTensor((SLOTS, c.HV, c.V, c.K), (ldp, c.V * c.K, c.K, 1), c.pool),
        T.Tensor((N,), "int32"),
        T.Tensor((N,), "int32") if c.moves else None,
        T.StridedTensor((N, c.HV, c.V), (ldo, c.V, 1), "bfloat16"),
    )


@T.macro
def _assume_wide(c, mixed, q, k, v):
    """Tell the compiler what the API has checked of these pitches."""
    if c.packed:
        steps.assume_wide(mixed, 1)
    else:
        steps.assume_wide(q, 1)
        steps.assume_wide(k, 1)
        steps.assume_wide(v, 1)


@T.macro
def _body(c, qkv, gates, pool, read, write, o, scale):
    N = read.shape[0]
    steps.assume_wide(o, 1)
    steps.assume_wide(pool, 1)
    with T.Kernel(lone_warps.grid(c, N), threads=c.threads) as cta:
        T.annotate_min_blocks_per_sm(c.blocks_per_sm)
        tx = T.get_thread_binding()
        T.pdl_sync()
        if lone_warps.is_small(c, N):
            _rows(c, c.few_rows, cta, tx, qkv, gates, pool, read, write, o, scale)
        else:
            _rows(c, c.rows, cta, tx, qkv, gates, pool, read, write, o, scale)


@T.macro
def _rows(c, rows: int, cta, tx, qkv, gates, pool, read, write, o, scale):
    """One token for the rows of this lane."""
    SLOTS, chunks = pool.shape[0], c.K // CHUNK // c.lanes
    q, k, v = qkv
    n, h, row, col = lone_warps.place(c, rows, cta, tx)
    raw, ready = lone_warps.token_buffers(c, chunks)
    state = T.alloc_local((rows, chunks, CHUNK), c.pool)
    S = T.alloc_local((rows, chunks, CHUNK), "float32")
    raw_v = T.alloc_local((rows,), "bfloat16")
    v_n = T.alloc_local((rows,), "float32")
    o_n = T.alloc_local((rows,), "float32")
    source = T.alloc_var("int32")
    target = T.alloc_var("int32")
    source = read[n]
    if c.moves:  # noqa: SIM108
        target = write[n]
    else:
        target = source
    present = source >= 0 and source < SLOTS
    lone_warps.load_token(c, q, k, gates, raw, n, h, col, chunks)
    lone_warps.load_values(c, v, raw_v, n, h, row, rows)
    lone_warps.load_state(c, present, pool, source, h, row, col, state, rows, chunks)
    T.pdl_trigger()
    lone_warps.prepare_token(c, gates, raw, ready, scale, chunks)
    for r in T.unroll(rows):
        v_n[r] = T.cast(raw_v[r], "float32")
    token.widen(state, S, rows, chunks)
    key, query, coef, kq = ready
    token.advance(S, key, query, v_n, coef[0, 0], coef[0, 1], kq[0], o_n, rows, chunks, c.lanes)
    token.narrow(S, state, rows, chunks)
    if present and target >= 0 and target < SLOTS:
        token.store_rows(state, pool, (target, h), row, col, rows, chunks, c.lanes)
    lone_warps.store_outputs(c, o_n, present, o, n, h, row, col, rows)
