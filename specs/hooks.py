"""The one mkdocs hook: it renders outcomes, the benchmark, the overview of gates, the claims, and values in prose.

Markers in a page: `<!-- outcomes -->` (a gate page), `<!-- gates -->`, `<!-- ledger -->`, `<!-- bench -->`,
`<!-- drift -->`, `<!-- ring-drift -->`, and values (`_render/values.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs restores sys.path after loading a hook

from specs._render.bench_page import bench_report
from specs._render.drift import drift_report
from specs._render.ledger import ledger, load_ledger
from specs._render.outcomes import gate_outcomes, overview
from specs._render.reading import SiteError
from specs._render.records import Site, load_site
from specs._render.ring_drift import ring_drift_report
from specs._render.values import expand, inline_value

_loaded: list[Site] = []


def on_files(files: Any, config: Any) -> Any:
    """Read everything once per build."""
    try:
        site = load_site(Path(config.docs_dir), Path(config.config_file_path).parent / ".gates")
    except SiteError as error:
        raise PluginError(str(error)) from error
    _loaded[:] = [site]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in markers and values. Any that cannot be filled stops the build with the page's name."""
    (site,) = _loaded
    where = page.file.src_uri

    def marker(name: str) -> str | None:
        if name == "gates":
            return overview(site)
        if name == "ledger":
            return ledger(site, load_ledger(Path(config.docs_dir) / "ledger.yml"))
        if name == "bench":
            return bench_report(site)
        if name == "drift":
            return drift_report(Path(config.docs_dir) / "results" / "drift.json")
        if name == "ring-drift":
            return ring_drift_report(Path(config.docs_dir) / "results" / "ring-drift.json")
        if name == "outcomes":
            match = re.fullmatch(r"gates/gate(\d+)\.md", where)
            if match is None:
                raise SiteError("the outcomes marker belongs on a page gates/gate<N>.md")
            return gate_outcomes(site, int(match[1]), "../")
        return None

    try:
        return expand(markdown, lambda value: inline_value(site, value), marker)
    except SiteError as error:
        raise PluginError(f"{where}: {error}") from error
