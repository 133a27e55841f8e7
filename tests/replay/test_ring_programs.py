"""Gate 5: what the compiler makes of the programs of the ring, and what the sanitizers find in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.replay import contract, ring
from kernels.replay.plan import cursors_plan, window_plan
from kernels.runtime import Program
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.machine_code import without_spills
from tests.replay.ring_cases import Server, split
from tests.replay.test_programs import planned

VARIANTS = (
    planned(window_plan),
    planned(window_plan, pool="float16"),
    planned(window_plan, pool="float32"),
    planned(window_plan, H=1, HV=3, V=64, gate_dtype="float32", bias_dtype="bfloat16"),
    planned(window_plan, H=1, HV=2, V=256, l2norm=False),
    planned(window_plan, H=16, HV=32),
)
CURSORS = cursors_plan()


@pytest.mark.costly
@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("program", VARIANTS, ids=lambda program: program.label)
def test_machine_code(program: Program, evidence: Evidence) -> None:
    c = program.config
    _, instructions = without_spills(program, {2: 255, 3: 168}[c.blocks_per_sm], evidence)
    # of both tiles: a lane's part of the rows of its warp
    state = (c.tiles + c.few_tiles) * c.K // 4 * {"float32": 4}.get(c.pool, 2) // 16
    evidence.at_least("16-byte loads to registers, less those of states", instructions.of("LDG", "128") - state, 0)
    evidence.at_least("16-byte stores, less those of states", instructions.of("STG", "128") - state, 0)
    evidence.at_least("16-byte asynchronous loads", instructions.of("LDGSTS", "128"), 8)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 64)


@pytest.mark.criterion("5.35")
def test_machine_code_of_the_cursors(evidence: Evidence) -> None:
    resources, instructions = without_spills(CURSORS, 64, evidence)
    evidence.equal("barriers", resources.barriers + instructions.of("BAR"), 0)
    evidence.equal("shared memory", resources.static_shared, 0, "B")


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("N", (1, 64))
def test_the_plan_does_not_depend_on_how_many(N: int, evidence: Evidence) -> None:
    """Few requests and many are told apart by the program at run time: with less work than CTAs the tile is smaller."""
    c = planned(window_plan, H=16, HV=32).config
    few = N * c.HV * (c.V // (c.warps * 8 * c.few_tiles)) <= c.ctas
    evidence.equal(f"the tile for few requests at N = {N}", few, N == 1)
    assert c.few_tiles < c.tiles


def launches(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, tuple[Any, ...]]]:
    """The launches of `call`, without running them."""
    found: list[tuple[Program, tuple[Any, ...]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "cpu_launcher", lambda program, *args: found.append((program, args)))
        call()
    return found


def sanitized(
    call: Callable[[], object], sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((program, args),) = launches(call, monkeypatch)
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])


def with_folds() -> Server:
    """Five slots beside two unused ones, as the reference leaves them: some with a fold, a history, both, neither."""
    server = Server(N=5, slots=7, max_tokens=6, capacity=6, pitched=True)
    for accepted in ((6, 2, 5, 0, 6), (3, 2, 6, 0, 0)):
        server.step([6] * 5, accept=False)
        server.accept(accepted)
    server.forget()
    assert sorted(record.pending for record in server.records.values()) == [False] * 5 + [True] * 2
    return server


@pytest.mark.costly
@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("ctas", (None, 3))
@pytest.mark.parametrize("sanitizer", ("thread", "address", "undefined"))
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, ctas: int | None, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds, histories, a request without tokens, and padding before the first slot and behind the last, whose
    neighbours other requests write."""
    split(monkeypatch, ctas)
    server = with_folds()
    order = sorted(server.slots)
    slots = [order[0], -1, *order[1:], 7]
    lengths = [6, 2, 1, 5, 0, 6, 3]
    sanitized(lambda: server.call(lengths, slots=slots, tail=2), sanitizer, evidence, monkeypatch)


@pytest.mark.criterion("5.33", "5.35")
@pytest.mark.parametrize("sanitizer", ("address", "undefined"))
@pytest.mark.parametrize(
    "starts", ((0, 30, 4), (-7, 4, 8), (2**31 - 1, 0, 8), (0, 4, 2**31 - 1), (0, 2**31 - 1, -(2**31))), ids=str
)
def test_senseless_lengths_under_sanitizers(
    starts: Sequence[int], sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = with_folds()
    monkeypatch.setattr(contract, "_check_lengths", lambda *_: None)
    x = server.tokens(8)

    def call() -> None:
        ring.verify(
            server.A_log, x.a, server.dt_bias, x.q, x.k, x.v, x.b, server.pool.view, server.indices(server.slots[:2]),
            server.indices(starts), server.window, o=torch.empty_like(x.v),
        )  # fmt: skip

    sanitized(call, sanitizer, evidence, monkeypatch)


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("sanitizer", ("thread", "address", "undefined"))
def test_sanitizers_on_the_cursors(
    sanitizer: sanitize.Sanitizer, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = with_folds()
    slots = server.indices([*server.slots, -1, 7, 2**31 - 1, -(2**31)])
    accepted = server.indices([0, 3, 6, 2**31 - 1, -(2**31), 1, 1, 1, 1])
    sanitized(lambda: ring.accept(server.window, slots, accepted), sanitizer, evidence, monkeypatch)
