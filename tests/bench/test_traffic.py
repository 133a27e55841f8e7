"""The ceilings' programs move what they say and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.runtime import Program
from probes import toolchain
from tests.bench.ceilings import candidates
from tests.bench.traffic import PATTERNS, Config
from tests.gate_engine import Evidence


@pytest.mark.criterion("7.4")
@pytest.mark.parametrize(
    ("pattern", "bulk"),
    [(pattern, False) for pattern in PATTERNS] + [("snapshots", True)],
    ids=lambda value: "bulk" if value is True else value or "simple",
)
@pytest.mark.parametrize("BV", (64, 128))
def test_what_a_pattern_moves(
    pattern: str, bulk: bool, BV: int, launch: Callable[..., None], device: torch.device, evidence: Evidence
) -> None:
    program = Program("tests.bench.traffic", Config(pattern, HV=2, BV=BV, bulk=bulk))
    before = torch.randn(3, 2, 128, 64).to(device)
    unset = torch.full((3, 4, 2, 128, 64), 7.0, device=device)
    pool, states, sink = before.clone(), unset.clone(), torch.zeros(1, device=device)
    launch(program, pool, states, sink)

    written: dict[str, Any] = {"snapshots": before[:, None].expand_as(unset), "write": torch.zeros_like(unset)}
    want = written.get(pattern, unset).clone()
    if pattern == "copy":
        want[:, 0] = before
    assert torch.equal(states, want)
    assert torch.equal(pool, -before if pattern == "in-place" else before)
    assert not sink.any()

    instructions = toolchain.sass(toolchain.cubin(runtime.lower(program).source))
    loads = pattern in ("read", "snapshots", "in-place", "copy")
    evidence.equal("tiles are loaded 16 bytes at a time", instructions.of("LDG", "128") > 0, loads)
    stores = pattern in ("write", "snapshots", "in-place", "copy") and not bulk
    evidence.equal("tiles are stored 16 bytes at a time", instructions.of("STG", "128") > 0, stores)
    evidence.equal("tiles are stored by bulk copies", instructions.of("UBLKCP") > 0, bulk)
    dependent = instructions.of("ACQBULK"), instructions.of("PREEXIT")
    evidence.equal("waits for the launch before it and lets the next one begin", dependent, (1, 1))


def test_bulk_copies_are_of_snapshots_alone() -> None:
    with pytest.raises(ValueError, match="pattern is copy, must be snapshots"):
        Program("tests.bench.traffic", Config("copy", bulk=True)).build()


@pytest.mark.criterion("7.4")
def test_a_read_cannot_be_optimised_away(launch: Callable[..., None], device: torch.device) -> None:
    """Every element reaches the comparison: a single 1e31 anywhere is found."""
    pool, states = torch.zeros(1, 2, 128, 64, device=device), torch.zeros(1, 1, 2, 128, 64, device=device)
    for place in ((0, 0, 0, 0), (0, 1, 127, 63), (0, 0, 77, 31)):
        pool.zero_()[place] = 1e31
        sink = torch.zeros(1, device=device)
        launch(Program("tests.bench.traffic", Config("read", HV=2)), pool, states, sink)
        assert sink.item() == pytest.approx(1e31)


@pytest.mark.criterion("7.4")
@pytest.mark.usefixtures("emulator")
def test_every_candidate_of_a_ceiling_runs(device: torch.device, evidence: Evidence) -> None:
    """With the bytes that it is credited with, counted in states of 32 KiB."""
    offered = candidates(device, (1, 3), N=2, HV=2)
    states = 2 * 2
    credited = {(c.ceiling, c.bytes / states / 2**15) for c in offered}
    expected = {("read", 3), ("write", 3), ("in-place", 2), ("copy", 2), ("snapshots-1", 2), ("snapshots-3", 4)}
    assert credited == expected | {("launch", 0)}
    for T in (1, 3):
        ways = [c.how for c in offered if c.ceiling == f"snapshots-{T}"]
        assert len(set(ways)) == len(ways) == 4 and sum("bulk copies" in how for how in ways) == 2
    for candidate in offered:
        candidate.launch(0)
    evidence.equal("ceilings with at least one candidate", len({c.ceiling for c in offered}), 7)
