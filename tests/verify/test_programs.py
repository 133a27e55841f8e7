"""Gate 3: what the compiler makes of the programs, and what the sanitizers find in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.runtime import Program
from kernels.verify.chunk import Config
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.machine_code import without_spills
from tests.verify.cases import make, store_in_bulk

#: every path through the program: operand parts, blocks, commit, gates, norms, V tiles
VARIANTS = (
    Config(H=2, HV=4),
    Config(H=2, HV=4, pool="float16"),
    Config(H=2, HV=4, pool="float32"),
    Config(H=1, HV=2, commit=True),
    Config(H=1, HV=2, blocks=True, blocks_per_sm=3),
    Config(H=1, HV=2, pool="float32", blocks=True, blocks_per_sm=3),
    Config(H=1, HV=2, head_batch=2),
    Config(H=1, HV=4, pool="float32", head_batch=4),
    Config(H=1, HV=2, raw_gates=False, gate_dtype="float32"),
    Config(H=1, HV=2, l2norm=False),
    Config(H=1, HV=2, V=64),
    Config(H=16, HV=32),
)


@pytest.mark.costly
@pytest.mark.criterion("3.21")
@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: Program("chunk", c).label)
def test_machine_code(config: Config, evidence: Evidence) -> None:
    registers = 65536 // 128 // config.blocks_per_sm // 8 * 8
    _, instructions = without_spills(Program("kernels.verify.chunk", config), registers, evidence)
    evidence.at_least("HMMA instructions", instructions.of("HMMA"), 16)
    evidence.at_least("16-byte asynchronous loads", instructions.of("LDGSTS", "128"), 9)
    evidence.at_least("16-byte stores", instructions.of("STG", "128"), 4)
    evidence.at_least("bulk stores", instructions.of("UBLKCP"), 1)


#: (sanitizer, options of the case)
SANITIZED: tuple[tuple[sanitize.Sanitizer, dict[str, Any]], ...] = (
    ("thread", {"T": (12, 0, 7)}),
    ("thread", {"T": (12, 7), "pool": torch.float32, "disable_state_update": False}),
    ("thread", {"T": (20, 16), "disable_state_update": False}),
    ("address", {"T": (12, 0, 7), "pitched": True}),
    ("address", {"T": (20, 16), "pool": torch.float32, "disable_state_update": False}),
    ("undefined", {"T": (12, 0, 7), "pitched": True}),
    ("thread", {"T": (12, 0, 7), "in_bulk": True}),
    ("thread", {"T": (12, 7), "pool": torch.float32, "disable_state_update": False, "in_bulk": True}),
    ("thread", {"T": (20, 12), "head_batch": 2, "in_bulk": True}),
    ("address", {"T": (12, 0, 7), "pitched": True, "head_batch": 2, "in_bulk": True}),
)


@pytest.mark.costly
@pytest.mark.criterion("3.20")
@pytest.mark.parametrize(("sanitizer", "options"), SANITIZED, ids=str)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, options: dict[str, Any], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sanitizer finds nothing, and the sanitized run computes what the plain one does."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    options = dict(options)
    if options.pop("in_bulk", False):
        store_in_bulk(monkeypatch)
    make(H=1, HV=2, tail=1, steps=21 if 20 in options["T"] else 16, **options).run()
    ((program, *args),) = calls
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])
