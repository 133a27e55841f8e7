"""The chunk program (kernels/verify/chunk.py) with the state after every token in a slot of the pool.

A request has a row of slots, one for each token. Its first state is in the one of the last token that was accepted
before, so that nothing is committed. That slot is also written. A warp has its 8 rows of the first state in registers
before it stores anything, and no other warp reads these rows, so that the order of tokens is all the order there is.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels.verify import chunk, signature
from kernels.verify.config import PagedConfig as Config

__all__ = ["PASS_CONFIGS", "Config", "build"]

PASS_CONFIGS = chunk.PASS_CONFIGS


def build(c: Config) -> Any:
    """The program. Its parameters are, in order:

    q, k, v, a, b, A_log, dt_bias, pool, slots [N, COLUMNS], accepted [N], cu_seqlens, o, scale, beta_scale, lowest.
    """
    QT, KT, VT, OT, AT, BT, AlogT, BiasT, PoolT, _, AcceptedT, CuT, *_ = signature.types(c)
    COLUMNS, lds = T.dynamic("COLUMNS"), T.dynamic("lds")
    SlotsT = T.StridedTensor((AcceptedT.shape[0], COLUMNS), (lds, 1), "int32")

    @T.prim_func
    def paged(
        q: QT, k: KT, v: VT, a: AT, b: BT, A_log: AlogT, dt_bias: BiasT, pool: PoolT, slots: SlotsT,
        accepted: AcceptedT, cu_seqlens: CuT, o: OT, scale: T.float32, beta_scale: T.float32, lowest: T.int32,
    ):  # fmt: skip
        chunk.body(c, q, k, v, (a, b, A_log, dt_bias, beta_scale), pool, slots, cu_seqlens, o, lowest, accepted, scale)

    return paged.with_attr("global_symbol", "verify_paged")
