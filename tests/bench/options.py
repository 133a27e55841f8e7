"""Command-line options of the benchmark; `nox -s bench -- <options>` passes them on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.bench.implementation import Implementation


def implementations(config: pytest.Config) -> list[Implementation]:
    """Ours and every entry of every peer, here or not."""
    from tests.bench.ours import ours
    from tests.bench.peers import peers

    return [*ours(), *peers(seed_checkout=config.getoption("--seed-checkout"))]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("speed", "benchmark of kernels and peers (nox -s bench)")
    group.addoption(
        "--speed", action="store_true", help="a benchmark run: --record writes specs/results/bench.sm90.json"
    )
    group.addoption("--full", action="store_true", help="the whole grid of shapes instead of the quick subset")
    group.addoption("--ops", default="", metavar="A,B", help="only these ops, for example verify-snapshots,decode")
    group.addoption("--heads", default="", metavar="H/HV", help="only this head shape, for example 16/32")
    group.addoption("--resume", action="store_true", help="go on with the last, unfinished run of this commit")
    group.addoption(
        "--compare",
        action="store_true",
        help="fail where a kernel is slower than specs/results/bench.sm90.json by over 5 %% and 0.8 us, twice in a row",
    )
    group.addoption(
        "--seed-checkout", type=Path, default=None, metavar="PATH", help="checkout of the seed's FlashQLA, as a peer"
    )
