"""Claims that rows of the benchmark decide: comparisons of two times, of a rate with its memory ceiling, of a time
with a number.

    decided_by:
      faster: {op: verify-snapshots, N: 1, T: 12, impl: "a-*/x", than: "b-*/y", at_least: 2.7}
      if_true: confirmed
      if_false: refuted

`faster` may be a list, and N a list: all must hold. H, HV, pool and cold are 16, 32, bf16 and true unless given. The
ratio is the time of `than` over that of `impl`, each the fastest checked row that its pattern matches; `than_op` takes
the other row from another op of the same shape. `share_at_least` asks for a share of the ceiling instead, or as well,
and `us_at_most` for microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specs._render.bench import OPS, Bench, Shape, parse_shape, real
from specs._render.freshness import freshness
from specs._render.html import micros, percent, times
from specs._render.reading import SiteError, take
from specs._render.records import Site

SHAPE_DEFAULTS = {"H": 16, "HV": 32, "pool": "bf16", "cold": True}
BOUNDS = ("at_least", "at_most", "share_at_least", "us_at_most")
KEYS = {"op", "N", "T", *SHAPE_DEFAULTS, "impl", "than", "than_op", *BOUNDS}
OUTCOMES = ("confirmed", "refuted", "superseded", "undecided")


@dataclass(frozen=True)
class Comparison:
    """One statement about measured rows."""

    shape: Shape
    impl: str
    than: str | None
    than_op: str
    at_least: float | None
    at_most: float | None
    share_at_least: float | None
    us_at_most: float | None


@dataclass(frozen=True)
class SpeedDecision:
    """The comparisons that decide a claim together, and its verdict if all hold or one does not."""

    comparisons: tuple[Comparison, ...]
    if_true: str
    if_false: str


def parse_comparison(data: dict[str, Any], where: str) -> Comparison:
    shape, impl = parse_shape(SHAPE_DEFAULTS | data, where), take(data, "impl", str, where)
    than = take(data, "than", str, where) if "than" in data else None
    than_op = take(data, "than_op", str, where) if "than_op" in data else shape.op
    bounds = {name: real(data, name, where, 0, null=False) if name in data else None for name in BOUNDS}
    if than_op not in OPS or ("than_op" in data and than is None):
        raise SiteError(f"{where}: 'than_op' must be an op and needs 'than', got {than_op!r}")
    if (than is None) != (bounds["at_least"] is None and bounds["at_most"] is None):
        raise SiteError(f"{where}: 'than' needs 'at_least' or 'at_most', and they need 'than'")
    if than is None and bounds["share_at_least"] is None and bounds["us_at_most"] is None:
        raise SiteError(f"{where}: nothing is compared; give 'than' with a bound, 'share_at_least' or 'us_at_most'")
    return Comparison(shape, impl, than, than_op, **bounds)


def parse_speed_decision(data: Any, where: str) -> SpeedDecision:
    """Raises SiteError for a key that means nothing, or a comparison that cannot be made."""
    where = f"{where} faster"
    said = [take(data, key, str, where) for key in ("if_true", "if_false")]
    if any(word not in OUTCOMES for word in said) or set(data) - {"faster", "if_true", "if_false"}:
        raise SiteError(
            f"{where}: needs 'faster', 'if_true' and 'if_false', each of {', '.join(OUTCOMES)}; got {data!r}"
        )
    items = data["faster"] if isinstance(data["faster"], list) else [data["faster"]]
    comparisons = []
    for item in items:
        if not isinstance(item, dict) or set(item) - KEYS:
            raise SiteError(f"{where}: a comparison has the keys {', '.join(sorted(KEYS))}; got {item!r}")
        for size in item["N"] if isinstance(item.get("N"), list) else [item.get("N")]:
            comparisons.append(parse_comparison(item | {"N": size}, where))
    if not comparisons:
        raise SiteError(f"{where}: no comparison")
    return SpeedDecision(tuple(comparisons), said[0], said[1])


def required(comparison: Comparison) -> str:
    found = [
        f"at {word} {bound:g}×"
        for word, bound in (("least", comparison.at_least), ("most", comparison.at_most))
        if bound is not None
    ]
    return " and ".join(found)


def judge(bench: Bench, comparison: Comparison) -> tuple[bool | None, str]:
    """(holds, what was measured against what is required); None if a row is missing."""
    shape, row = comparison.shape, bench.fastest(comparison.shape, comparison.impl)
    if row is None:
        return None, f"no checked time of {comparison.impl} on {shape.text}"
    holds, said = True, []
    if comparison.than is not None:
        other = bench.fastest(replace(shape, op=comparison.than_op), comparison.than)
        if other is None:
            return None, f"no checked time of {comparison.than} on {replace(shape, op=comparison.than_op).text}"
        ratio = other.time / row.time
        holds = (comparison.at_least is None or ratio >= comparison.at_least) and (
            comparison.at_most is None or ratio <= comparison.at_most
        )
        against = f"{other.impl}{f' ({comparison.than_op})' if comparison.than_op != shape.op else ''}"
        said.append(
            f"{row.impl} {micros(row.time)} µs, {against} {micros(other.time)} µs: {times(ratio)}"
            f" (asked: {required(comparison)})"
        )
    if comparison.share_at_least is not None:
        if row.share is None:
            return None, f"no share of a ceiling of {row.impl} on {shape.text}"
        holds = holds and row.share >= comparison.share_at_least
        wanted = percent(comparison.share_at_least)
        said.append(f"{row.impl} at {percent(row.share)} of its memory ceiling (asked: at least {wanted})")
    if comparison.us_at_most is not None:
        holds = holds and row.time <= comparison.us_at_most
        said.append(f"{row.impl} {micros(row.time)} µs (asked: at most {comparison.us_at_most:g} µs)")
    return holds, f"{shape.text}: {', '.join(said)}"


def speed_verdict(site: Site, decision: SpeedDecision, unmeasured: str) -> tuple[str, str]:
    """(verdict, what was measured). A stale record, or one without the rows, leaves the claim `unmeasured`."""
    bench = site.bench
    if bench is None:
        return unmeasured, "no benchmark run is recorded"
    if freshness(site, bench) == "stale":
        return unmeasured, "the benchmark's record is stale"
    found = [judge(bench, comparison) for comparison in decision.comparisons]
    missing = [text for holds, text in found if holds is None]
    if missing:
        return unmeasured, "; ".join(missing)
    verdict = decision.if_true if all(holds for holds, _ in found) else decision.if_false
    return verdict, "; ".join(text for _, text in found)
