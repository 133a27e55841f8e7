"""Tiny random-weight models, and greedy tokens of them; also run as a script on another version of transformers."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import torch

#: model -> the class of its text model with a head, and of its configuration
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
}
H, HV = 2, 4
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": H,
    "linear_num_value_heads": HV,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def make(name: str, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are large enough that a state matters to the next token."""
    code, (model, config) = module(name), MODELS[name]
    torch.manual_seed(seed)
    made = getattr(code, model)(getattr(code, config)(**SIZES, initializer_range=0.2))
    for key, weight in made.named_parameters():
        if key.endswith("A_log"):  # decays slowly, so that what a state held long ago counts
            weight.data.fill_(-3.0)
    return made.to(device=device, dtype=dtype).eval()


def prompt(length: int, batch: int = 1, seed: int = 1, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=generator).to(device)


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, tokens: int = 24) -> list[list[int]]:
    """New tokens of each row."""
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return [row[ids.shape[1] :].tolist() for row in out]


def patched_and_stock(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Tokens of both, for prompts of one, a few and many tokens, and what the log said."""
    import integration.transformers as adapter

    model, result = make(name, device=device, dtype=dtype), {}
    for length, batch in ((1, 1), (7, 2), (70, 1)):
        ids = prompt(length, batch, device=device)
        stock = greedy(model, ids)
        with adapter.patch():
            ours = greedy(model, ids)
            lines = sorted(adapter._said)
        result[str(length)] = {"stock": stock, "ours": ours, "lines": lines}
    return result


def main() -> None:
    import transformers

    print("RESULT", json.dumps({"version": transformers.__version__, **{m: patched_and_stock(m) for m in MODELS}}))


if __name__ == "__main__":
    main()
