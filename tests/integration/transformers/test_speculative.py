"""The speculative loop against plain greedy generation, with drafters that are right as often as chance says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.gate_engine import Evidence
from tests.integration.transformers import cases

pytest.importorskip("transformers")

from integration.transformers import speculative

TOKENS = 60


def drafter(truth: Sequence[int], prompt: int, right: float, seed: int = 0) -> speculative.Drafter:
    """Each draft token is the greedy one with probability `right`; one that is not is another token."""
    chance = random.Random(seed)

    def draft(tokens: list[int], count: int) -> list[int]:
        new = len(tokens) - prompt
        ahead = [*truth[new : new + count], *[1] * count][:count]
        return [t if chance.random() < right else (t + 1) % cases.SIZES["vocab_size"] for t in ahead]

    return draft


def greedy_and_prompt(name: str, **options: Any) -> tuple[Any, list[int], list[int]]:
    model, ids = cases.make(name, **options), cases.prompt(9, device=options.get("device", "cpu"))
    return model, ids[0].tolist(), cases.greedy(model, ids, TOKENS + 16)[0]


@pytest.mark.criterion("6.13")
@pytest.mark.parametrize("block", (12, 16))
@pytest.mark.parametrize("name", cases.MODELS)
def test_speculative_tokens_are_the_greedy_ones(name: str, block: int, evidence: Evidence) -> None:
    model, prompt, truth = greedy_and_prompt(name)
    for right in (0.0, 0.8, 0.95, 1.0):
        drafts = drafter(truth, len(prompt), right, seed=block)
        result = speculative.generate(model, prompt, drafts, block=block, max_new_tokens=TOKENS)
        evidence.equal("speculative tokens equal greedy ones", result.tokens == truth[:TOKENS], True)
        evidence.equal("tokens committed", result.committed, result.accepted + result.blocks)
        if right == 0.0:
            evidence.equal("drafts accepted of none that was right", result.accepted, 0)
        if right == 0.8:
            evidence.at_least("blocks in part rejected", result.drafted - result.accepted, 1)
            evidence.at_least("drafts accepted", result.accepted, 1)
        if right == 1.0:
            evidence.at_most("blocks, when every draft is right", result.blocks, -(-(TOKENS - 1) // block))


@pytest.mark.criterion("6.15")
@pytest.mark.parametrize("mistake", ("stale state", "one token too many", "conv not rewound"))
def test_wrong_rejections_are_seen(mistake: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, truth = greedy_and_prompt("qwen3_next")
    commit = speculative.Verifier.commit

    def stale(self: speculative.Verifier, length: int) -> int:
        self.layer = 0
        return 0

    def longer(self: speculative.Verifier, length: int) -> int:
        return commit(self, min(length + 1, self.block))

    def attention_only(cache: Any, linear: Sequence[int], tokens: int) -> None:
        for i, layer in enumerate(cache.layers):
            if i in linear:
                layer.crop(0)
            elif tokens:
                layer.crop(-tokens)

    if mistake == "conv not rewound":
        monkeypatch.setattr(speculative, "rewind", attention_only)
    else:
        wrong = stale if mistake == "stale state" else longer
        monkeypatch.setattr(speculative.Verifier, "commit", wrong)
    drafts = drafter(truth, len(prompt), 0.8)
    result = speculative.generate(model, prompt, drafts, block=12, max_new_tokens=TOKENS)
    evidence.equal("tokens of a wrong loop equal greedy ones", result.tokens == truth[:TOKENS], False)


@pytest.mark.criterion("6.13")
def test_arguments_are_checked() -> None:
    model = cases.make("qwen3_next")
    wrong: tuple[dict[str, Any], ...] = ({"block": 1}, {"max_new_tokens": 0})
    for options in wrong:
        with pytest.raises(ValueError, match="must be at least"):
            speculative.generate(model, [1, 2], lambda tokens, count: [1] * count, **options)
    with pytest.raises(ValueError, match="the drafter gave 1"):
        speculative.generate(model, [1, 2], lambda tokens, count: [1], block=12, max_new_tokens=20)
