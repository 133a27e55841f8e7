"""The speed that memory allows, measured in every run: each ceiling is the best of several ways to move the bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kernels import runtime
from kernels.runtime import Program
from tests.bench import timing
from tests.bench.problem import Shape
from tests.bench.traffic import Config

ROUNDS = 9


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """`value` in GB/s, or in microseconds for the launch of an empty kernel; `how`: what reached it."""

    value: float
    unit: str
    how: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to reach a ceiling: a launch that moves `bytes`."""

    ceiling: str
    how: str
    bytes: int
    launch: Callable[[int], Any]


def ceiling_of(shape: Shape, ceilings: dict[str, Ceiling]) -> Ceiling | None:
    """The ceiling that applies to a shape's traffic: the one with the same mix of reads and writes."""
    if shape.op == "verify-snapshots":
        known = [int(name.removeprefix("snapshots-")) for name in ceilings if name.startswith("snapshots-")]
        nearest = min(known, key=lambda tokens: abs(tokens - shape.T), default=0)
        return ceilings.get(f"snapshots-{nearest}")
    return ceilings.get({"decode": "in-place", "decode-dense": "copy", "commit": "copy"}.get(shape.op, "read"))


def candidates(device: torch.device, tokens: Iterable[int], N: int = 256, HV: int = 32) -> list[Candidate]:
    """N requests of HV bf16 states of 128 x 128: 256 MiB at the defaults, several times the L2 cache."""
    tokens = list(tokens)
    pool = torch.randn(N, HV, 128, 64, device=device)
    room = torch.empty(N, max(tokens), HV, 128, 64, device=device)
    sink = torch.zeros(1, device=device)
    found = []

    def traffic(
        ceiling: str, pattern: str, moved: int, states: torch.Tensor, source: torch.Tensor, bulk: bool = False
    ) -> None:
        for BV in (64, 128):
            program = Program("tests.bench.traffic", Config(pattern, HV=HV, BV=BV, bulk=bulk))
            how = f"{pattern} by CTAs of {BV} rows{', in bulk copies' if bulk else ''}, {N} x {HV} states"

            def launch(way: int, program: Program = program) -> None:
                runtime.launch(program, source, states, sink)

            found.append(Candidate(ceiling, how, moved, launch))

    size, one = pool.numel() * pool.element_size(), room.view(-1)[: pool.numel()].view(N, 1, HV, 128, 64)
    large = room.view(-1, HV, 128, 64)
    traffic("read", "read", large.numel() * 4, large.unsqueeze(1), large)
    traffic("in-place", "in-place", 2 * size, one, pool)
    traffic("copy", "copy", 2 * size, one, pool)
    found.append(Candidate("copy", "torch's copy_", 2 * size, lambda way: one.copy_(pool.unsqueeze(1))))
    for T in tokens:
        states = room.view(-1)[: T * pool.numel()].view(N, T, HV, 128, 64)
        for bulk in (False, True):
            traffic(f"snapshots-{T}", "snapshots", (1 + T) * size, states, pool, bulk)
    traffic("write", "write", large.numel() * 4, room, pool)
    found.append(Candidate("write", "torch's zero_", large.numel() * 4, lambda way: room.zero_()))
    empty = Program("tests.bench.traffic", Config("nothing", HV=HV))
    found.append(
        Candidate(
            "launch", "an empty kernel, launch after launch", 0, lambda way: runtime.launch(empty, pool, one, sink)
        )
    )
    return found


def measure_ceilings(device: torch.device, tokens: Iterable[int]) -> dict[str, Ceiling]:
    """Name -> ceiling: read, write, copy, in-place, snapshots-<T> for every T of `tokens`, and launch."""
    offered = candidates(device, tokens)
    replays = {str(i): timing.Replay(c.launch, 1).round for i, c in enumerate(offered)}
    samples = timing.interleave(replays, ROUNDS)
    best: dict[str, Ceiling] = {}
    for i, candidate in enumerate(offered):
        us = timing.median(samples[str(i)])
        if candidate.ceiling == "launch":
            best["launch"] = Ceiling(us, "us", candidate.how)
            continue
        gbps = candidate.bytes / us * 1e-3
        if candidate.ceiling not in best or gbps > best[candidate.ceiling].value:
            best[candidate.ceiling] = Ceiling(gbps, "GB/s", candidate.how)
    return best
