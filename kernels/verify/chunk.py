"""Verify with per-token states in the chunk form (specs/design/chunk-form.md).

    Y_k | Y_q = S_0 [K | Q]^T            one [V x K] x [K x 2 TM] product of raw bf16 operands
    A | B     = [K | Q] [K | Q]^T        one Gram product; its diagonal holds the norms
    u_t = beta_t (v_t - e^{G_t} Y_k[:, t] - sum_{i<t} D_ti A_ti u_i)
    o_t = e^{G_t} Y_q[:, t] + sum_{i<=t} D_ti B_ti u_i
    S_t = e^{g_t} S_{t-1} + u_t k_t^T    stored for every token

One CTA owns `BV` rows of one value head of one request: BV x K of the state in registers (BV * K / threads each), the
block's k and q, and its V columns of v in shared memory. In the solve, threads tx and tx + BV own row tx % BV: both
solve it, each writes every second output. A state that is not bf16 enters the product as two (fp16) or three (fp32)
exact bf16 parts, and so does the fp32 state carried from one block of 16 tokens to the next.
Shared memory: 53 KiB at BV = 64, K = 128.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.tile import TM
from kernels.verify.config import PARTS, Config

PASS_CONFIGS: dict[str, Any] = {"tl.disable_warp_specialized": True}  # every thread has one role


def build(c: Config) -> Any:
    """The program's parameters, in order:

    q, k, v, a, b, A_log, dt_bias, pool, state_indices, cu_seqlens, o, states, state_rows, scale, beta_scale;
    without `raw_gates` g, beta stand in place of a, b, A_log, dt_bias, and there is no beta_scale.
    """
    NT, N, SLOTS, ROWS, STEPS = (T.dynamic(name) for name in ("NT", "N", "SLOTS", "ROWS", "STEPS"))
    ldq, ldk, ldv, ldo, ldp, ldr, lds = (T.dynamic(f"ld{x}") for x in ("q", "k", "v", "o", "p", "r", "s"))
    lda, ldb, la, lb = (T.dynamic(name) for name in ("lda", "ldb", "la", "lb"))
    head = c.V * c.K

    QT = T.StridedTensor((NT, c.H, c.K), (ldq, c.K, 1), "bfloat16")
    KT = T.StridedTensor((NT, c.H, c.K), (ldk, c.K, 1), "bfloat16")
    VT = T.StridedTensor((NT, c.HV, c.V), (ldv, c.V, 1), "bfloat16")
    OT = T.StridedTensor((NT, c.HV, c.V), (ldo, c.V, 1), "bfloat16")
    AT = T.StridedTensor((NT, c.HV), (lda, la), c.gate_dtype)
    BT = T.StridedTensor((NT, c.HV), (ldb, lb), c.gate_dtype)
    PoolT = T.StridedTensor((SLOTS, c.HV, c.V, c.K), (ldp, head, c.K, 1), c.pool)
    StatesT = T.StridedTensor((ROWS, STEPS, c.HV, c.V, c.K), (ldr, lds, head, c.K, 1), c.pool)
    IndexT, CuT, RowT = (T.Tensor((n,), "int32") for n in (N, N + 1, N))
    AlogT, BiasT = T.Tensor((c.HV,), "float32"), T.Tensor((c.HV,), c.bias_dtype)

    if c.raw_gates:

        @T.prim_func
        def verify_chunk_raw(
            q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
            pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
            scale: T.float32, beta_scale: T.float32,
        ):  # fmt: skip
            gates = (a, b, A_log, dt_bias, beta_scale)
            _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale)

        return verify_chunk_raw

    @T.prim_func
    def verify_chunk(
        q: QT, k: KT, v: VT, g: AT, beta: BT,
        pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
        scale: T.float32,
    ):  # fmt: skip
        _body(c, q, k, v, (g, beta), pool, state_indices, cu_seqlens, o, states, state_rows, scale)

    return verify_chunk


@T.macro
def _body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale):
    NT, N, SLOTS, ROWS, STEPS = (
        q.shape[0],
        state_indices.shape[0],
        pool.shape[0],
        states.shape[0],
        states.shape[1],
    )
    v_tiles = c.V // c.BV
    with T.Kernel(N * c.HV * v_tiles, threads=c.threads) as cta:
        steps.assume_wide(q, 1)
        steps.assume_wide(k, 1)
        steps.assume_wide(v, 1)
        steps.assume_wide(o, 1)
        steps.assume_wide(pool, 1)
        steps.assume_wide(states, 2)
        T.annotate_min_blocks_per_sm(3)  # caps registers at 168, which no variant spills under
        tx = T.get_thread_binding()
        v0 = cta % v_tiles * c.BV
        h = cta // v_tiles % c.HV
        n = cta // (v_tiles * c.HV)
        slot = T.alloc_var("int32")
        row = T.alloc_var("int32")
        start = T.alloc_var("int32")
        length = T.alloc_var("int32")
        slot = state_indices[n]
        row = state_rows[n]
        start = T.max(cu_seqlens[n], 0)
        length = T.min(cu_seqlens[n + 1], NT) - start
        steps.zero_tail(o, T.max(cu_seqlens[N], 0), n, N, h, v0, c.BV)
        if slot >= 0 and slot < SLOTS:
            _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, ROWS, STEPS, scale, h, v0, tx)
        else:
            for t in T.serial(length):
                for i in T.Parallel(c.BV):
                    o[start + t, h, v0 + i] = T.bfloat16(0)


@T.macro
def _request(c, q, k, v, gates, pool, slot, start, length, o, states, row, ROWS, STEPS, scale, h, v0, tx):
    """All blocks of one request for BV rows of one value head."""
    S = T.alloc_fragment((c.BV, c.K), "float32")
    S_s = T.alloc_shared((c.BV, c.K), "bfloat16")
    KQ_s = T.alloc_shared((2 * TM, c.K), "bfloat16")
    V_s = T.alloc_shared((TM, c.BV), "bfloat16")
    Y = T.alloc_fragment((c.BV, 2 * TM), "float32")
    Y_s = T.alloc_shared((c.BV, 2 * TM + 1), "float32")
    gram = T.alloc_fragment((2 * TM, 2 * TM), "float32")
    gram_s = T.alloc_shared((2 * TM, 2 * TM + 1), "float32")
    coef_s = T.alloc_shared((2 * TM, TM), "float32")
    U_s = T.alloc_shared((TM, c.BV), "float32")
    Kn_s = T.alloc_shared((TM, c.K), "float32")
    g_s = T.alloc_shared((TM,), "float32")
    beta_s = T.alloc_shared((TM,), "float32")
    decay_s = T.alloc_shared((TM,), "float32")
    from_start_s = T.alloc_shared((TM,), "float32")
    inv_norm_s = T.alloc_shared((2 * TM,), "float32")
    u = T.alloc_local((TM,), "float32")
    T.clear(u)
    hk = h // (c.HV // c.H)
    in_registers = c.blocks or PARTS[c.pool] > 1
    parts = 3 if c.blocks else PARTS[c.pool]

    if in_registers:
        T.copy(pool[slot, h, v0 : v0 + c.BV, 0 : c.K], S)
    else:
        T.async_copy(pool[slot, h, v0 : v0 + c.BV, 0 : c.K], S_s)
    for block in T.serial(T.ceildiv(length, TM) if c.blocks else T.min(length, 1)):
        t0 = start + block * TM
        L = T.min(length - block * TM, TM)
        steps.stage_rows(k, KQ_s, 0, t0, hk, 0, L)
        steps.stage_rows(q, KQ_s, TM, t0, hk, 0, L)
        steps.stage_rows(v, V_s, 0, t0, h, v0, L)
        if c.raw_gates:
            steps.raw_gates(*gates, g_s, beta_s, t0, h, L, tx)
        else:
            steps.activated_gates(*gates, g_s, beta_s, t0, h, L, tx)
        T.sync_threads()

        T.gemm(KQ_s, KQ_s, gram, transpose_B=True, clear_accum=True)
        T.copy(gram, gram_s[0 : 2 * TM, 0 : 2 * TM])
        T.sync_threads()
        steps.norms_and_decays(gram_s, g_s, inv_norm_s, decay_s, from_start_s, scale, c.l2norm, tx)
        T.sync_threads()
        steps.block_coefficients(gram_s, g_s, inv_norm_s, coef_s, tx, c.threads)
        for t, j in T.Parallel(TM, c.K):
            Kn_s[t, j] = T.cast(KQ_s[t, j], "float32") * inv_norm_s[t]

        # Y = S_0 [K | Q]^T
        if in_registers:
            T.clear(Y)
            for part in T.serial(parts):
                steps.split_part(S, S_s, part)
                T.sync_threads()
                T.gemm(S_s, KQ_s, Y, transpose_B=True)
                T.sync_threads()
        else:
            T.ptx_wait_group(0)
            T.sync_threads()
            T.gemm(S_s, KQ_s, Y, transpose_B=True, clear_accum=True)
        T.copy(Y, Y_s[0 : c.BV, 0 : 2 * TM])
        T.sync_threads()
        steps.solve_row(
            Y_s, V_s, U_s, coef_s, beta_s, from_start_s, inv_norm_s, u, o, t0, h, v0, L, c.BV, c.threads, tx
        )

        # S_t = e^{g_t} S_{t-1} + u_t k_t^T
        if not in_registers:
            for i, j in T.Parallel(c.BV, c.K):
                S[i, j] = T.cast(S_s[i, j], "float32")
        T.sync_threads()
        for t in T.serial(L):
            for i, j in T.Parallel(c.BV, c.K):
                S[i, j] = S[i, j] * decay_s[t] + U_s[t, i] * Kn_s[t, j]
            if row >= 0 and row < ROWS and block * TM + t < STEPS:
                T.copy(S, states[row, block * TM + t, h, v0 : v0 + c.BV, 0 : c.K])
        if c.blocks:
            T.sync_threads()
    if c.commit and length > 0:
        T.copy(S, pool[slot, h, v0 : v0 + c.BV, 0 : c.K])
