"""`pytest --sample SEED`: a few cases of each test marked `costly`, which makes a program of its own in many cases.

Which ones depends on the seed alone, so that runs of other commits take other cases. A gate always needs all of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

import pytest

#: cases of a costly test that a sample has
CASES = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("gates").addoption(
        "--sample", metavar="SEED", help=f"run {CASES} cases of each test marked costly; others for another seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "costly: generates or compiles a program a case; `--sample` runs a few")
    if config.getoption("--sample") is not None and config.getoption("--gate") is not None:
        raise pytest.UsageError("--sample leaves tests out, and --gate needs all: give one of them")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--sample")
    if seed is None:
        return
    cases: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("costly"):
            cases[function_of(item.nodeid)].append(item.nodeid)
    left_out = {node for nodes in cases.values() for node in nodes} - {
        node for nodes in cases.values() for node in sample(nodes, seed)
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def function_of(nodeid: str) -> str:
    """A node id without its parameters."""
    return nodeid.partition("[")[0]


def sample(nodes: list[str], seed: str) -> list[str]:
    """CASES of them, the same for the same seed whatever their order."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{seed} {node}".encode()).digest())[:CASES]
