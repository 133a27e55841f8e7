"""`pytest --sample`: a few cases of each test marked `costly`, which makes a program of its own in many cases.

Which ones depends on the commit alone, so that others take other cases. A gate always needs all of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

from tests import machine as machine_facts

#: cases of a costly test that a sample has
CASES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("gates").addoption(
        "--sample", action="store_true", help=f"run {CASES} cases of each test marked costly, chosen by the commit"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "costly: generates or compiles a program a case; `--sample` runs a few")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--sample"):
        return
    seed = machine_facts.commit(config.rootpath).removesuffix("-dirty")
    costly: dict[str, list[str]] = defaultdict(list)  # node ids of a test
    for item in items:
        if item.get_closest_marker("costly"):
            costly[item.nodeid.partition("[")[0]].append(item.nodeid)
    chosen = {node for nodes in costly.values() for node in sample(nodes, seed)}
    left_out = [item for item in items if item.get_closest_marker("costly") and item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("costly") or item.nodeid in chosen]


def sample(nodes: list[str], seed: str) -> list[str]:
    """CASES of them, the same for the same seed whatever their order."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{seed} {node}".encode()).digest())[:CASES]
