"""The parameters that the verify programs share. Each has a type object of its own: sharing one would merge buffers."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels import steps


def types(c: Any) -> tuple[Any, ...]:
    """Of q, k, v, o, a (or g), b (or beta), A_log, dt_bias, pool, states, state_indices, cu_seqlens, state_rows,
    q_inv_norm, k_inv_norm, in this order, for a `Config` or a `RecurrentConfig`. Sizes and pitches are symbols."""
    NT, N, SLOTS, ROWS, STEPS = (T.dynamic(name) for name in ("NT", "N", "SLOTS", "ROWS", "STEPS"))
    ldq, ldk, ldv, ldo, ldp, ldr, lds = (T.dynamic(f"ld{x}") for x in ("q", "k", "v", "o", "p", "r", "s"))
    lda, ldb, la, lb = (T.dynamic(name) for name in ("lda", "ldb", "la", "lb"))
    head = c.V * c.K
    return (
        T.StridedTensor((NT, c.H, c.K), (ldq, c.K, 1), "bfloat16"),
        T.StridedTensor((NT, c.H, c.K), (ldk, c.K, 1), "bfloat16"),
        T.StridedTensor((NT, c.HV, c.V), (ldv, c.V, 1), "bfloat16"),
        T.StridedTensor((NT, c.HV, c.V), (ldo, c.V, 1), "bfloat16"),
        T.StridedTensor((NT, c.HV), (lda, la), c.gate_dtype),
        T.StridedTensor((NT, c.HV), (ldb, lb), c.gate_dtype),
        T.Tensor((c.HV,), "float32"),
        T.Tensor((c.HV,), c.bias_dtype),
        T.StridedTensor((SLOTS, c.HV, c.V, c.K), (ldp, head, c.K, 1), c.pool),
        T.StridedTensor((ROWS, STEPS, c.HV, c.V, c.K), (ldr, lds, head, c.K, 1), c.pool),
        *(T.Tensor((n,), "int32") for n in (N, N + 1, N)),
        *(T.Tensor((NT, c.H), "float32") for _ in range(2)),
    )


@T.macro
def assume_wide(q, k, v, o, pool, states, dims: int = 2):
    """Tell the compiler what the API has checked of these pitches, of states `dims`."""
    steps.assume_wide(q, 1)
    steps.assume_wide(k, 1)
    steps.assume_wide(v, 1)
    steps.assume_wide(o, 1)
    steps.assume_wide(pool, 1)
    steps.assume_wide(states, dims)


def build(c: Any, name: str, body: Any) -> Any:
    """The PrimFunc `name` whose parameters are, in order:

    q, k, v, a, b, A_log, dt_bias, pool, state_indices, cu_seqlens, o, states, state_rows, scale, beta_scale;
    without `raw_gates` g, beta stand in place of a, b, A_log, dt_bias, and there is no beta_scale; with `norms_given`
    q_inv_norm, k_inv_norm follow them. It runs body(c, q, k, v, gates, pool, ..., state_rows, scale), where gates are
    a, b, A_log, dt_bias, beta_scale, or g and beta, and the norms if given.
    """
    QT, KT, VT, OT, AT, BT, AlogT, BiasT, PoolT, StatesT, IndexT, CuT, RowT, QNormT, KNormT = types(c)

    if c.raw_gates:

        @T.prim_func
        def raw(
            q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT,
            pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
            scale: T.float32, beta_scale: T.float32,
        ):  # fmt: skip
            gates = (a, b, A_log, dt_bias, beta_scale)
            body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale)

        return raw.with_attr("global_symbol", f"{name}_raw")

    if getattr(c, "norms_given", False):

        @T.prim_func
        def normed(
            q: QT, k: KT, v: VT, g: AT, beta: BT, q_inv_norm: QNormT, k_inv_norm: KNormT,
            pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
            scale: T.float32,
        ):  # fmt: skip
            gates = (g, beta, q_inv_norm, k_inv_norm)
            body(c, q, k, v, gates, pool, state_indices, cu_seqlens, o, states, state_rows, scale)

        return normed.with_attr("global_symbol", f"{name}_normed")

    @T.prim_func
    def activated(
        q: QT, k: KT, v: VT, g: AT, beta: BT,
        pool: PoolT, state_indices: IndexT, cu_seqlens: CuT, o: OT, states: StatesT, state_rows: RowT,
        scale: T.float32,
    ):  # fmt: skip
        body(c, q, k, v, (g, beta), pool, state_indices, cu_seqlens, o, states, state_rows, scale)

    return activated.with_attr("global_symbol", name)
