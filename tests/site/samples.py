"""Small sites made of plain values, for tests that need no file."""

from __future__ import annotations

from typing import Any

from specs._render.records import Gate, Record, Site, parse_record

GATES = (
    Gate(0, "gate0", "primitives", "gates/gate0.md", {"0.1": "compiles", "0.2": "`wgmma` <is> used"}),
    Gate(7, "bench", "speed", None, {}),
)


def evidence(name: str = "o rel L2", value: Any = 1.7e-3, limit: Any = 3e-3, **changes: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "unit": "", "relation": "<=", "cases": 12} | changes


def result(verdict: str = "pass", tests: int = 5, *items: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": verdict, "tests": tests, "evidence": list(items)}


def data(machine: str = "cpu", **changes: Any) -> dict[str, Any]:
    """The JSON of a record of gate 0 in which both criteria pass."""
    return {
        "gate": 0,
        "machine": machine,
        "device": {"cpu": "x86_64 CPU", "sm90": "NVIDIA H200"}[machine],
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "versions": {"torch": "2.13.0"},
        "sources": {"probes.x(N=8)": "aaaa"},
        "criteria": {"0.1": result("pass", 5, evidence()), "0.2": result()},
    } | changes


def record(machine: str = "cpu", *, recorded: bool = True, **changes: Any) -> Record:
    content = data(machine, **changes)
    return parse_record(content, f"results/gate{content['gate']}.{machine}.json", recorded=recorded)


def site(*records: Record, sources: dict[str, str] | None = None) -> Site:
    return Site(GATES, records, sources)
