"""Move the cursors of a ring by the accepted tokens of every request (specs/design/replay.md).

The rows of a slot hold, from row `base` on, `folding` tokens that the next verify folds into the state, `live` tokens
of history, and the new tokens of the last verify. Accepting some of them

    base = base + folding;  folding = 0                            (they were folded)
    live = live + accepted                                         as long as that is at most `capacity`
    folding = live;  live = accepted;  fold = fold + 1             otherwise
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
from typing import Any

import tilelang.language as T

from kernels.replay.config import CursorConfig as Config
from kernels.tile import each
from reference.ring import BASE, CURSORS, FOLD, FOLDING, LIVE

PASS_CONFIGS: dict[str, Any] = {
    "tl.disable_warp_specialized": True,
    "tl.disable_safe_memory_legalize": True,  # every index below is guarded where it is formed
}


def build(c: Config) -> Any:
    """The program's parameters, in order: cursors, state_indices, accepted, rows, capacity, max_tokens."""
    N, SLOTS = T.dynamic("N"), T.dynamic("SLOTS")
    CursorT, IndexT, LengthT = T.Tensor((SLOTS, CURSORS), "int32"), T.Tensor((N,), "int32"), T.Tensor((N,), "int32")

    @T.prim_func
    def replay_cursors(
        cursors: CursorT, state_indices: IndexT, accepted: LengthT, rows: T.int32, capacity: T.int32, most: T.int32
    ):
        with T.Kernel(T.ceildiv(N, c.threads), threads=c.threads) as block:
            n = block * c.threads + T.get_thread_binding()
            T.pdl_sync()
            if n < N:
                _move(cursors, state_indices, accepted, n, rows, capacity, most)
            T.pdl_trigger()

    return replay_cursors


@T.macro
def _move(cursors, state_indices, accepted, n, rows, capacity, most):
    """Those of request n."""
    slot, L, live, base = (T.alloc_var("int32") for _ in each(4))
    slot = state_indices[n]
    L = T.max(T.min(accepted[n], most), 0)
    if slot >= 0 and slot < cursors.shape[0]:
        live = cursors[slot, LIVE]
        base = cursors[slot, BASE] + cursors[slot, FOLDING]
        cursors[slot, BASE] = T.Select(base >= rows, base - rows, base)
        if live + L <= capacity:
            cursors[slot, FOLDING] = 0
            cursors[slot, LIVE] = live + L
        else:
            cursors[slot, FOLDING] = live
            cursors[slot, LIVE] = L
            cursors[slot, FOLD] = cursors[slot, FOLD] + 1
