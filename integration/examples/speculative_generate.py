"""Speculative decoding of a tiny random-weight Qwen3-Next, checked against plain greedy generation.

    python -m integration.examples.speculative_generate                    on the CPU, in seconds
    python -m integration.examples.speculative_generate --device cuda      with the kernels, on a Hopper GPU

The drafter knows the greedy tokens and is right with a given probability, so that acceptance can be set.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from integration import environment


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (reference) or cuda (kernels); default: cpu")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate; default: 96")
    parser.add_argument("--block", type=int, default=16, help="tokens of a verify, 2 to 16; default: 16")
    parser.add_argument("--right", type=float, default=0.9, help="probability of a right draft token; default: 0.9")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}, must be at least 1")
    if not 2 <= options.block <= 16:
        parser.error(f"--block is {options.block}, must be between 2 and 16")
    if not 0 <= options.right <= 1:
        parser.error(f"--right is {options.right}, must be between 0 and 1")
    if options.device not in ("cpu", "cuda"):
        parser.error(f"--device is {options.device}, must be cpu or cuda")
    return options


def tiny_model(seed: int, device: str) -> Any:
    """Four layers, one of them full attention; bf16 on a GPU, as the kernels take it."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def report(options: argparse.Namespace) -> None:
    """Generates both ways and prints the summary. Exits with status 1 if the tokens differ."""
    environment.check()
    import torch
    import tqdm

    from integration.transformers import speculative

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device; leave the option out to compute the reference on the CPU")
    model = tiny_model(options.seed, options.device)
    prompt = [1, 2, 3, 5, 8]
    ids = torch.tensor([prompt], device=options.device)
    count = options.tokens + options.block
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count,
        )  # fmt: skip
    plain = count / (time.perf_counter() - start)
    truth = out[0, len(prompt) :].tolist()
    chance = random.Random(options.seed)

    def draft(tokens: list[int], length: int) -> list[int]:
        ahead = truth[len(tokens) - len(prompt) :][:length]
        return [token if chance.random() < options.right else (token + 1) % 512 for token in ahead]

    start = time.perf_counter()
    with tqdm.tqdm(total=options.tokens, unit="token") as bar:
        done = speculative.generate(
            model, prompt, draft, block=options.block, max_new_tokens=options.tokens, progress=bar.update
        )
    seconds = time.perf_counter() - start
    print(f"tokens: {len(done.tokens)} in {done.blocks} blocks of {options.block}")
    print(f"speed: {len(done.tokens) / seconds:.1f} tokens/s, plain generation {plain:.1f} tokens/s")
    share = done.accepted / done.drafted if done.drafted else 0.0
    print(f"drafts: {done.accepted} of {done.drafted} accepted ({share:.1%})")
    print(f"states stored: {done.snapshot_bytes} bytes by verify, {done.commit_bytes} bytes by commit")
    if done.tokens != truth[: options.tokens]:
        sys.exit("the tokens differ from those of plain greedy generation")
    print("the tokens are those of plain greedy generation")


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    try:
        report(options)
    except ImportError as error:
        sys.exit(f"speculative_generate: {error}")
    except KeyboardInterrupt:
        sys.exit("speculative_generate: interrupted")


if __name__ == "__main__":
    main()
