"""Which shapes a run measures: a quick subset by default, the whole grid on demand. The axes are tests/shapes.py's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.bench.problem import DTYPES, Shape
from tests.shapes import BATCHES, HEADS, POOLS, TOKENS

POOL_NAMES = tuple(name for name, dtype in DTYPES.items() if dtype in POOLS)
QUICK_BATCHES = (1, 8, 64, 256)
QUICK_TOKENS = (4, 8, 12, 16)
VERIFY_OPS = ("verify-snapshots", "verify-replay")
#: a ring call of the peer takes these
RING_TOKENS = (4, 8)
OUR_RING_TOKENS = (12,)
DENSE_TOKENS = (1, 8)


def quick() -> Iterator[Shape]:
    """16/32 heads: every op over four batch sizes in bf16; decode and T = 12 in fp32; what warm states change.

    decode-dense is fp32 alone, as its states are.
    """
    for N in QUICK_BATCHES:
        for op in VERIFY_OPS:
            for T in QUICK_TOKENS:
                yield Shape(op, N, T)
        yield Shape("decode", N, 1)
        yield Shape("decode", N, 1, pool="fp32")
        yield Shape("verify-snapshots", N, 12, pool="fp32")
        yield Shape("commit", N, 12)
        for T in RING_TOKENS + OUR_RING_TOKENS:
            yield Shape("ring", N, T)
        yield Shape("decode-ring", N, 1)
        for T in DENSE_TOKENS:
            yield Shape("decode-dense", N, T, pool="fp32")
    for N in (1, 8):
        yield Shape("verify-snapshots", N, 12, cold=False)
        yield Shape("decode", N, 1, cold=False)


def full() -> Iterator[Shape]:
    """The quick shapes, a look at every head shape, then every batch size, token count, head shape and pool dtype.

    In this order a run that is cut short has seen a little of everything.
    """
    yield from quick()
    for H, HV in HEADS:
        for N in QUICK_BATCHES:
            yield Shape("verify-snapshots", N, 12, H, HV)
            yield Shape("decode", N, 1, H, HV)
    for H, HV in HEADS:
        for pool in POOL_NAMES:
            for N in BATCHES:
                for T in TOKENS:
                    for op in VERIFY_OPS:
                        yield Shape(op, N, T, H, HV, pool)
                yield Shape("decode", N, 1, H, HV, pool)
                yield Shape("commit", N, 12, H, HV, pool)
                for T in RING_TOKENS:
                    yield Shape("ring", N, T, H, HV, pool)


def chosen(whole: bool, ops: Iterable[str] = (), heads: str = "") -> list[Shape]:
    """The shapes of a run, each once; `ops` and `heads` ("16/32") narrow them."""
    ops = tuple(ops)
    known_ops, known_heads = {s.op for s in full()}, {f"{s.H}/{s.HV}" for s in full()}
    if unknown := set(ops) - known_ops:
        raise ValueError(f"no shape of op {', '.join(sorted(unknown))}; known: {', '.join(sorted(known_ops))}")
    if heads and heads not in known_heads:
        raise ValueError(f"no shape with heads {heads}; known: {', '.join(sorted(known_heads))}")
    shapes = dict.fromkeys(full() if whole else quick())
    return [s for s in shapes if (not ops or s.op in ops) and (not heads or heads == f"{s.H}/{s.HV}")]
