"""The same on the hardware, in bf16, which the kernels take."""

from __future__ import annotations

import pytest
import torch

from tests.gate_engine import Evidence
from tests.integration.transformers import cases

pytest.importorskip("transformers")

from integration.transformers import speculative
from tests.integration.transformers.test_patch import check_tokens
from tests.integration.transformers.test_speculative import TOKENS, drafter, greedy_and_prompt

pytestmark = [pytest.mark.sm90, pytest.mark.usefixtures("free_memory")]


@pytest.mark.criterion("6.16")
@pytest.mark.parametrize("name", cases.MODELS)
def test_greedy_tokens(name: str, evidence: Evidence) -> None:
    check_tokens(cases.patched_and_stock(name, device="cuda", dtype=torch.bfloat16), evidence)


@pytest.mark.criterion("6.16")
@pytest.mark.parametrize("block", (12, 16))
@pytest.mark.parametrize("name", cases.MODELS)
def test_speculative_tokens(name: str, block: int, evidence: Evidence) -> None:
    model, prompt, truth = greedy_and_prompt(name, device="cuda", dtype=torch.bfloat16)
    for right in (0.0, 0.8, 1.0):
        drafts = drafter(truth, len(prompt), right, seed=block)
        result = speculative.generate(model, prompt, drafts, block=block, max_new_tokens=TOKENS)
        evidence.equal("speculative tokens equal greedy ones", result.tokens == truth[:TOKENS], True)
