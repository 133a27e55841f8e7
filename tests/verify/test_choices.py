"""Gate 3: how states are stored, and how many heads share a CTA, changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import runtime
from kernels.verify.plan import plan
from tests.gate_engine import Evidence
from tests.verify.cases import Case, check, make, store_in_bulk

pytestmark = pytest.mark.usefixtures("emulator")

SHAPES: tuple[dict[str, Any], ...] = (
    {"T": (16, 0, 7, 12), "tail": 2, "pitched": True},
    {"T": (12, 9), "pool": torch.float32, "disable_state_update": False},
    {"T": (6, 13), "pool": torch.float16, "steps": 14},
    {"T": (20, 7), "H": 1, "disable_state_update": False},
)


def equal(first: Case, second: Case, evidence: Evidence) -> None:
    for buffer in ("o", "states", "pool"):
        one, other = (getattr(case, buffer) for case in (first, second))
        differing = int((one.storage.view(torch.uint8) != other.storage.view(torch.uint8)).sum())
        evidence.equal(f"bytes of {buffer} that differ", differing, 0)


@pytest.mark.costly
@pytest.mark.criterion("3.37")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bulk_stores_change_no_bit(
    shape: dict[str, Any], device: torch.device, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = make(seed=5, device=device, **shape)
    direct.run()
    store_in_bulk(monkeypatch)
    bulk = make(seed=5, device=device, **shape)
    bulk.run()
    check(bulk, evidence)
    equal(direct, bulk, evidence)


@pytest.mark.costly
@pytest.mark.criterion("3.37")
@pytest.mark.parametrize(("head_batch", "H", "HV"), ((2, 2, 4), (2, 1, 4), (4, 1, 4)))
@pytest.mark.parametrize("in_bulk", (False, True), ids=("direct", "bulk"))
def test_heads_that_share_a_cta_change_no_bit(
    head_batch: int, H: int, HV: int, in_bulk: bool, device: torch.device, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shape: dict[str, Any] = {"T": (12, 3, 16), "H": H, "HV": HV, "V": 64, "tail": 1, "pitched": True, "seed": 8}
    alone = make(device=device, **shape)
    alone.run()
    if in_bulk:
        store_in_bulk(monkeypatch)
    shared = make(device=device, head_batch=head_batch, **shape)
    shared.run()
    check(shared, evidence)
    equal(alone, shared, evidence)


@pytest.mark.criterion("3.38")
@pytest.mark.parametrize(
    ("facts", "module", "expected"),
    (
        (
            {"max_tokens": 1, "lossless": True},
            "short",
            {"tokens": 1, "lossless": True, "rows": 4, "few_rows": 2, "few_up_to": 2048, "blocks_per_sm": 16},
        ),
        ({"max_tokens": 0}, "short", {"tokens": 1, "lossless": False}),
        ({"max_tokens": 2}, "short", {"tokens": 2, "few_up_to": 512, "blocks_per_sm": 12}),
        ({"max_tokens": 1, "pool": "float32"}, "short", {"rows": 2, "few_rows": 1, "few_up_to": 2048}),
        (
            {"max_tokens": 2, "pool": "float32"},
            "short",
            {"rows": 2, "few_rows": 1, "few_up_to": 2048, "blocks_per_sm": 16},
        ),
        ({"max_tokens": 2, "head_batch": 2}, "chunk", {"head_batch": 2}),
        ({"max_tokens": 2, "norms_given": True, "raw_gates": False}, "chunk", {"norms_given": True}),
        ({"max_tokens": 3}, "chunk", {"blocks": False}),
        ({}, "chunk", {"blocks": False, "blocks_per_sm": 4, "head_batch": 1, "direct_up_to": 2048}),
        ({"max_tokens": 17}, "chunk", {"blocks": True, "blocks_per_sm": 3}),
        ({"head_batch": 2}, "chunk", {"head_batch": 2}),
        ({"norms_given": True, "raw_gates": False}, "chunk", {"norms_given": True}),
        ({"commit": True}, "chunk", {"commit": True}),
        ({"lossless": True, "max_tokens": 40}, "recurrent", {"lanes": 8, "blocks_per_sm": 5}),
    ),
    ids=str,
)
def test_every_branch_of_the_plan(
    facts: dict[str, Any], module: str, expected: dict[str, Any], evidence: Evidence
) -> None:
    usual: dict[str, Any] = {
        "H": 2, "HV": 4, "K": 128, "V": 128, "pool": "bfloat16", "raw_gates": True, "gate_dtype": "bfloat16",
        "bias_dtype": "float32", "l2norm": True, "commit": False, "max_tokens": 16,
    }  # fmt: skip
    program: runtime.Program = plan(**usual | facts)
    evidence.equal("module", program.module, f"kernels.verify.{module}")
    found = {name: getattr(program.config, name) for name in expected}
    evidence.equal("configuration", found, expected)
