"""Values of the benchmark record inside prose.

    {{ bench verify-snapshots N=64 T=12 us }}                          of the fastest of ours: us, gbps, share
    {{ bench verify-snapshots N=64 T=12 share impl="sglang-*" }}       of the fastest that matches
    {{ bench verify-snapshots N=64 T=12 ratio }}                       the best peer's time over ours
    {{ bench verify-snapshots N=64 T=12 ratio than="sglang-*" }}       that peer's time over ours
    {{ bench verify-snapshots N=64 T=12 peer }}                        which peer is the best
    {{ bench device }}                                                 device, date or commit of the run

The shape may also say H, HV, pool and cold; without them it is 16/32 heads, a bf16 pool and cold states.
"""

from __future__ import annotations

import re

from specs._render.bench import OPS, OURS, POOLS, Bench, Row, Shape
from specs._render.freshness import freshness
from specs._render.html import badge, esc, micros, missing, percent, times
from specs._render.reading import SiteError
from specs._render.records import Site

FIELDS = ("us", "gbps", "share", "ratio", "peer")
RUN_FIELDS = ("device", "date", "commit")
SIZES = ("N", "T", "H", "HV")
PATTERNS = ("impl", "than")


def parse_settings(words: list[str], where: str) -> tuple[dict[str, str], str]:
    """(settings, field) of the words behind the op. Raises SiteError for a word that means nothing."""
    settings, fields = {}, []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            fields.append(word)
        elif key in settings or key not in (*SIZES, *PATTERNS, "pool", "cold") or not value:
            raise SiteError(f"{where}: {word!r} is set twice or means nothing; a shape has N, T, H, HV, pool and cold")
        else:
            settings[key] = value
    if len(fields) != 1 or fields[0] not in FIELDS:
        raise SiteError(f"{where}: expected one of {', '.join(FIELDS)}, got {' '.join(fields) or 'none'}")
    return settings, fields[0]


def parse_shape(op: str, settings: dict[str, str], where: str) -> Shape:
    if op not in OPS:
        raise SiteError(f"{where}: unknown op {op!r}, expected one of {', '.join(OPS)}")
    sizes = {key: settings[key] for key in SIZES if key in settings}
    if not {"N", "T"} <= set(sizes) or not all(re.fullmatch(r"[1-9]\d*", size) for size in sizes.values()):
        raise SiteError(f"{where}: needs N=... and T=..., positive integers")
    pool, cold = settings.get("pool", "bf16"), settings.get("cold", "true")
    if pool not in POOLS or cold not in ("true", "false"):
        raise SiteError(f"{where}: pool must be one of {', '.join(POOLS)}, and cold true or false")
    return Shape(op, **{key: int(size) for key, size in sizes.items()}, pool=pool, cold=cold == "true")


def text_of(bench: Bench, shape: Shape, field: str, settings: dict[str, str]) -> str | None:
    """The value as text, None where the record does not have it."""
    row = bench.fastest(shape, settings.get("impl", OURS))
    if field in ("ratio", "peer"):
        peer: Row | None = bench.fastest(shape, settings["than"]) if "than" in settings else bench.best_peer(shape)
        if row is None or peer is None:
            return None
        return times(peer.time / row.time) if field == "ratio" else peer.impl
    if row is None:
        return None
    if field == "us":
        return f"{micros(row.time)} µs"
    value = row.gbps if field == "gbps" else row.share
    if value is None:
        return None
    return f"{value:.0f} GB/s" if field == "gbps" else percent(value)


def bench_value(site: Site, words: list[str]) -> str:
    """HTML of one `{{ bench ... }}`, given the words behind `bench`. Raises SiteError for what cannot be meant."""
    where = f"{{{{ bench {' '.join(words)} }}}}"
    bench = site.bench
    if len(words) == 1:
        if words[0] not in RUN_FIELDS:
            raise SiteError(f"{where}: a run has a device, a date and a commit, not {words[0]!r}")
        return esc(getattr(bench, words[0])) if bench else missing("bench")
    if not words:
        raise SiteError(f"{where}: expected an op, a shape and one of {', '.join(FIELDS)}")
    settings, field = parse_settings(words[1:], where)
    if "than" in settings and field != "ratio":
        raise SiteError(f"{where}: 'than' belongs to ratio")
    shape = parse_shape(words[0], settings, where)
    text = text_of(bench, shape, field, settings) if bench else None
    if bench is None or text is None:
        return missing(shape.text)
    fresh = freshness(site, bench)
    mark = " " + badge("stale") if fresh == "stale" else ""
    if fresh == "unknown":
        mark = ' <small class="missing">freshness unknown</small>'
    return f'<span class="value" title="{esc(shape.text)}, {esc(bench.name)}">{esc(text)}</span>{mark}'
