"""Gates and inverse norms of all tokens, each computed once: what every V tile of a verify otherwise computes again.

    g_t    = -exp(A_log) softplus(a_t + dt_bias)      beta_t = beta_scale sigmoid(b_t)
    |k_t|^-1 = rsqrt(k_t . k_t + eps)                 |q_t|^-1 likewise, without the scale

Bit-faithful to the chunk program of verify: the gates are the same functions, and the squares are the diagonals of
K K^T and Q Q^T by the same tensor-core products in the same order (steps.share_token_products).

One warp owns 8 tokens of one key head, with the gates of its value heads; requests do not matter. Nothing is shared
between warps, so there is no shared memory and no barrier. A lane holds 8 columns of one token of q and of k at a time.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps
from kernels.prepass.config import Config
from kernels.tile import each
from kernels.warp import CHUNK, QUAD, mma, rows_fragment

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,  # every thread has one role
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
}
TOKENS = 8  # of a warp: the columns of one tensor-core product


def build(c: Config) -> Any:
    """The program's parameters, in order: q, k, a, b, A_log, dt_bias, g, beta, q_inv_norm, k_inv_norm, beta_scale."""
    NT = T.dynamic("NT")
    ldq, ldk, lda, ldb, la, lb = (T.dynamic(name) for name in ("ldq", "ldk", "lda", "ldb", "la", "lb"))
    QT = T.StridedTensor((NT, c.H, c.K), (ldq, c.K, 1), "bfloat16")
    KT = T.StridedTensor((NT, c.H, c.K), (ldk, c.K, 1), "bfloat16")
    AT = T.StridedTensor((NT, c.HV), (lda, la), c.gate_dtype)
    BT = T.StridedTensor((NT, c.HV), (ldb, lb), c.gate_dtype)
    AlogT, BiasT = T.Tensor((c.HV,), "float32"), T.Tensor((c.HV,), c.bias_dtype)
    # A type of its own for each: parameters that share one become one buffer.
    GT, BetaT = (T.Tensor((NT, c.HV), "float32") for _ in range(2))
    QNormT, KNormT = (T.Tensor((NT, c.H), "float32") for _ in range(2))

    @T.prim_func
    def prepass(
        q: QT, k: KT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT, g: GT, beta: BetaT,
        q_inv_norm: QNormT, k_inv_norm: KNormT, beta_scale: T.float32,
    ):  # fmt: skip
        warps = c.threads // 32
        with T.Kernel(T.ceildiv(T.ceildiv(NT, TOKENS) * c.H, warps), threads=c.threads) as cta:
            steps.assume_wide(q, 1)
            steps.assume_wide(k, 1)
            tx = T.get_thread_binding()
            T.pdl_sync()
            warp = cta * warps + tx // 32
            t0, head = warp // c.H * TOKENS, warp % c.H
            _gates(c, a, b, A_log, dt_bias, g, beta, beta_scale, t0, head, NT, tx % 32)
            _inverse_norms(c, q, k, q_inv_norm, k_inv_norm, t0, head, NT, tx % 32 // 4, tx % 4)
            T.pdl_trigger()

    return prepass


@T.macro
def _gates(c, a, b, A_log, dt_bias, g, beta, beta_scale, t0, head, NT, lane):
    """g and beta of 8 tokens and the value heads of one key head."""
    group = c.HV // c.H
    rate, bias, x = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
    for i in T.unroll(T.ceildiv(TOKENS * group, 32)):
        t = t0 + (i * 32 + lane) // group
        h = head * group + (i * 32 + lane) % group
        if i * 32 + lane < TOKENS * group and t < NT:
            rate = A_log[h]
            bias = T.cast(dt_bias[h], "float32")
            x = T.cast(b[t, h], "float32")
            g[t, h] = steps.log_decay(rate, T.cast(a[t, h], "float32") + bias)
            beta[t, h] = beta_scale * T.sigmoid(x)


@T.macro
def _inverse_norms(c, q, k, q_inv_norm, k_inv_norm, t0, head, NT, g, quad):
    """1 / |q_t| and 1 / |k_t| of 8 tokens of one key head; lane (g, quad) has 8 columns of token t0 + g at a time."""
    k_t, q_t = (T.alloc_local((c.K // 4,), "bfloat16") for _ in each(2))
    k_chunk, q_chunk = (T.alloc_local((CHUNK,), "bfloat16") for _ in each(2))
    A = T.alloc_local((2 * CHUNK,), "bfloat16")
    by_k, by_q = (T.alloc_local((8,), "float32") for _ in each(2))  # two chains; rows g: k_t, g + 8: q_t
    t = t0 + g
    T.clear(by_k)
    T.clear(by_q)
    for j in T.unroll(c.K // QUAD):
        for e in T.vectorized(CHUNK):
            k_t[j * CHUNK + e] = T.if_then_else(t < NT, k[t, head, j * QUAD + quad * CHUNK + e], T.bfloat16(0))
        for e in T.vectorized(CHUNK):
            q_t[j * CHUNK + e] = T.if_then_else(t < NT, q[t, head, j * QUAD + quad * CHUNK + e], T.bfloat16(0))
    for j in T.unroll(c.K // QUAD):
        for e in T.vectorized(CHUNK):
            k_chunk[e] = k_t[j * CHUNK + e]
        for e in T.vectorized(CHUNK):
            q_chunk[e] = q_t[j * CHUNK + e]
        rows_fragment(k_chunk, q_chunk, A)
        for half in T.unroll(2):
            mma(A, half * CHUNK, k_chunk, half * 4, by_k, half * 4)
            mma(A, half * CHUNK, q_chunk, half * 4, by_q, half * 4)
    for i in T.unroll(4):
        by_k[i] = by_k[i] + by_k[4 + i]
        by_q[i] = by_q[i] + by_q[4 + i]
    if quad == g // 2 and t < NT:  # this lane has the diagonal's entries of token t
        k_inv_norm[t, head] = steps.inverse_norm(T.Select(g % 2 == 0, by_k[0], by_k[1]), 1.0, True)
        q_inv_norm[t, head] = steps.inverse_norm(T.Select(g % 2 == 0, by_q[2], by_q[3]), 1.0, True)
