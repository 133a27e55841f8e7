"""Which pieces of work of a verify behind a ring a CTA has, and what it needs to know of their requests.

A request that folds takes about twice as long as another. So requests are ordered, those that fold first, and the CTAs
take units of them in turn: each has as many long ones as any other, give or take one. A unit is the pieces of a key
head, which share its keys, or a single piece where whole key heads would take more turns. Every CTA makes the order for
itself, before its first piece. More than `c.requests` are dealt out in blocks, each to CTAs of its own.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import tilelang.language as T

from kernels.tile import TM, each
from reference.ring import BASE, FOLD, FOLDING, LIVE

UNITS = 128  # that a CTA can have
AT_ONCE = 8  # requests that a lane looks up at a time
#: rows of `units`: slot (-1: padding), first new token, new tokens, first row of the ring, tokens to fold, tokens of
#: history, number of the fold, the request, and the first piece of it
SLOT, START, TOKENS, FIRST, TO_FOLD, HISTORY, FOLD_NUMBER, REQUEST, PIECE, FIELDS = range(10)


def pieces_of_head(c, tiles: int) -> int:
    return c.V // (c.warps * 8 * tiles)


def few_pieces(c, N):
    """Whether N requests have so few pieces that the small ones are no more than the CTAs."""
    return N * (c.HV * pieces_of_head(c, c.few_tiles)) <= c.ctas


def ctas_of_block(c, N, few):
    """CTAs that share a block of requests: all that an H200 runs at once, or one for each piece."""
    return T.if_then_else(
        few, N * (c.HV * pieces_of_head(c, c.few_tiles)), T.min(N * (c.HV * pieces_of_head(c, c.tiles)), c.ctas)
    )


def pieces_of_unit(c, tiles: int, count, ctas):
    """Pieces of a unit of `count` requests on `ctas` CTAs."""
    whole = c.HV // c.H * pieces_of_head(c, tiles)
    turns, single = T.ceildiv(count * c.H, ctas) * whole, T.ceildiv(count * c.H * whole, ctas)
    return T.if_then_else(turns <= single, whole, 1)


@T.macro
def order_requests(c, order, first, count, state_indices, cursors, lane):
    """order[0:count] = 0 to count - 1, those first whose requests `first` + i fold. One warp."""
    slots, folding = T.alloc_local((AT_ONCE,), "int32"), T.alloc_local((AT_ONCE,), "int32")
    per, marks, before, others, total, own = (T.alloc_var("int32") for _ in each(6))
    SLOTS = cursors.shape[0]
    per = T.ceildiv(count, 32)
    marks = 0
    own = 0
    for i in T.serial(T.ceildiv(per, AT_ONCE)):
        for e in T.unroll(AT_ONCE):
            slots[e] = -1
            if i * AT_ONCE + e < per and lane * per + i * AT_ONCE + e < count:
                slots[e] = state_indices[first + lane * per + i * AT_ONCE + e]
        for e in T.unroll(AT_ONCE):
            folding[e] = 0
            if slots[e] >= 0 and slots[e] < SLOTS:
                folding[e] = cursors[slots[e], FOLDING]
        for e in T.unroll(AT_ONCE):
            if folding[e] > 0:
                marks = marks | (1 << (i * AT_ONCE + e))
                own = own + 1
    before = own
    for step in each(5):
        others = T.shfl_up(before, 1 << step)
        before = before + T.Select(lane >= 1 << step, others, 0)
    total = T.shfl_sync(before, 31)
    before = before - own
    others = total + T.min(lane * per, count) - before
    for i in T.serial(per):
        if lane * per + i < count:
            if (marks >> i) % 2 != 0:
                order[before] = lane * per + i
                before = before + 1
            else:
                order[others] = lane * per + i
                others = others + 1


@T.macro
def share_units(
    c, units, order, first, count, of_unit, of_request, cta, ctas, state_indices, cu_seqlens, cursors, NT, tx
):
    """units[:, i] = what the rows above say, of unit i of this CTA or of padding. All threads, one unit each."""
    unit, n, slot, start, tokens = (T.alloc_var("int32") for _ in each(5))
    cursor = T.alloc_local((4,), "int32")
    SLOTS = cursors.shape[0]
    unit = tx * ctas + cta
    n = 0
    slot = -1
    start = 0
    tokens = 0
    T.clear(cursor)
    if unit < count * (of_request // of_unit):
        n = first + order[unit // (of_request // of_unit)]
        slot = state_indices[n]
        start = T.max(cu_seqlens[n], 0)
        tokens = T.min(T.max(T.min(cu_seqlens[n + 1], NT), 0) - start, TM)
        if slot >= SLOTS:
            slot = -1
        if slot >= 0:
            for e in T.vectorized(4):
                cursor[e] = cursors[slot, e]
    units[SLOT, tx] = T.max(slot, -1)
    units[START, tx] = start
    units[TOKENS, tx] = tokens
    units[FIRST, tx] = cursor[BASE]
    units[TO_FOLD, tx] = cursor[FOLDING]
    units[HISTORY, tx] = cursor[LIVE]
    units[FOLD_NUMBER, tx] = cursor[FOLD]
    units[REQUEST, tx] = n
    units[PIECE, tx] = unit % (of_request // of_unit) * of_unit
