"""The parameters that the verify programs share. Each has a type object of its own: sharing one would merge buffers."""

# mypy: disable-error-code="no-untyped-def, valid-type"
from __future__ import annotations

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
def assume_wide(q, k, v, o, pool, states):
    """Tell the compiler what the API has checked of these pitches."""
    steps.assume_wide(q, 1)
    steps.assume_wide(k, 1)
    steps.assume_wide(v, 1)
    steps.assume_wide(o, 1)
    steps.assume_wide(pool, 1)
    steps.assume_wide(states, 2)
