"""Small benchmark records made of plain values. No number in them was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specs._render.bench import Bench, parse_bench
from specs._render.records import Record, Site
from tests.site.samples import GATES

OURS, TRITON, SEED = "kernels/verify", "sglang-0.5.23/triton-verify", "flashqla-066a214/gated"
LABEL = "kernels.verify.chunk(H=16)"
CURRENT = {LABEL: "aaaa"}
STALE = {LABEL: "bbbb"}
LIMIT = 4000.0  # GB/s of every ceiling


def row(impl: str = OURS, us: float | None = 10.0, *, share: float = 0.5, **changes: Any) -> dict[str, Any]:
    """A timed row at N = 64, T = 12; without `us`, one of a peer that is not there."""
    shape = {"op": "verify-snapshots", "N": 64, "T": 12, "H": 16, "HV": 32, "pool": "bf16", "cold": True}
    measured = {
        "us": us,
        "gbps": LIMIT * share,
        "share": share,
        "checked": True,
        "spread": 0.01,
        "errors": {"o": 1.7e-3},
        "note": "",
    }
    if us is None:
        measured |= {"gbps": None, "share": None, "checked": False, "spread": None, "errors": {}, "note": "not here: x"}
    return shape | {"impl": impl} | measured | changes


def data(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    names = ("read", "write", "copy", "in-place", "snapshots-4", "snapshots-8", "snapshots-12", "snapshots-16")
    ceilings = {name: {"value": LIMIT, "unit": "GB/s", "how": f"bare `{name}`"} for name in names}
    return {
        "device": "NVIDIA H200",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "versions": {"torch": "2.11.0"},
        "sources": dict(CURRENT),
        "ceilings": ceilings | {"launch": {"value": 1.6, "unit": "us", "how": "an empty kernel"}},
        "rows": list(rows),
        "starts": [],
    } | changes


def bench(*rows: dict[str, Any], recorded: bool = True, **changes: Any) -> Bench:
    return parse_bench(data(*rows, **changes), "results/bench.sm90.json", recorded=recorded)


def site(
    *rows: dict[str, Any], sources: dict[str, str] | None = CURRENT, records: tuple[Record, ...] = (), **changes: Any
) -> Site:
    """A site with one recorded benchmark run."""
    return Site(GATES, records, sources, (bench(*rows, **changes),))


def grid() -> list[dict[str, Any]]:
    """Several shapes with everything that a record may hold; at N = 1 a peer is faster."""
    rows = []
    for n in (1, 8, 64, 256):
        for t in (4, 8, 12, 16):
            where = {"N": n, "T": t}
            rows += [row(OURS, 3.0 * n + 1, share=0.9, **where), row(TRITON, 3.5 * n, share=0.7, **where)]
            rows.append(row(SEED, 4.0 * n, share=0.6, note="`auto` tile", **where))
            rows.append(row("flashinfer-0.7.4/mtp", None, note="wrong: o differs", errors={"o": 0.5}, **where))
            rows.append(row("fla-0.5/recurrent", None, note="not supported: bf16 pool", **where))
        for pool, cold in (("fp32", True), ("bf16", False)):
            rows.append(row(OURS, 5.0 * n, share=0.9, N=n, pool=pool, cold=cold))
        rows.append(row("kernels/decode", 2.0 * n + 2, op="decode", N=n, T=1))
        rows.append(row("vllm-0.11/packed-decode", 2.0 * n, op="decode", N=n, T=1, note="whole call"))
    return rows


def starts() -> list[dict[str, Any]]:
    return [
        {"impl": OURS, "what": "eager-call", "value": 21.5, "unit": "us", "note": "N = 1"},
        {"impl": TRITON, "what": "first-call", "value": None, "unit": "s", "note": "not measured for peers"},
    ]


def write(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.sm90.json").write_text(json.dumps(content))
