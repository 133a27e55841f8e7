"""Greedy speculative decoding of a model with Gated DeltaNet layers: verify a block, commit what was accepted.

A block is one forward pass: the tokens of every Gated DeltaNet layer go through `kernels.verify`, which leaves the pool
of states as it is and keeps the state after each of them; the one after the last accepted token goes into the pool.
The convolution's states and the keys and values of full attention are cut back to the same token.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from integration import environment
from integration.transformers import CHUNK, modules

Drafter = Callable[[list[int], int], Sequence[int]]
_one_at_a_time = threading.Lock()


@dataclasses.dataclass
class Summary:
    """What a generation did. Tokens are those of the block that the model was asked about, without its first one."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0  # tokens whose states were committed, over all blocks
    snapshot_bytes: int = 0  # states that verify stored
    commit_bytes: int = 0  # states that commits copied


class Verifier:
    """Stands in for the chunked function of every model module while a block runs; layers come in their order."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.pools: list[Any] = []
        self.snapshots: list[Any] = []
        self.layer = 0

    def start(self, states: Sequence[Any]) -> None:
        """states: [1, HV, K, V] fp32 of every layer, after the prompt."""
        self.pools = [state.mT.contiguous() for state in states]
        self.snapshots = [pool.new_empty((1, self.block, *pool.shape[1:])) for pool in self.pools]

    def __call__(
        self, query: Any, key: Any, value: Any, g: Any, beta: Any, *, initial_state: Any,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """q, k [1, T, H or HV, K], v [1, T, HV, V], g and beta [1, T, HV]. The cached state comes back unchanged."""
        import torch

        from kernels.verify import fused_recurrent_gdr_verify_fwd

        pool, snapshots = self.pools[self.layer], self.snapshots[self.layer]
        self.layer += 1
        q, k, v = (x[0].contiguous() for x in (query, key, value))
        o = torch.empty_like(v)
        first = torch.zeros(1, dtype=torch.int32, device=v.device)
        starts = torch.tensor([0, v.shape[0]], dtype=torch.int32, device=v.device)
        fused_recurrent_gdr_verify_fwd(
            q, k, v, g[0].float(), beta[0].float(), pool, first, starts, o, snapshots, first,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return o[None], initial_state

    def commit(self, length: int) -> int:
        """Keep the states after `length` tokens of the block. Returns the bytes copied."""
        if self.layer != len(self.pools):
            raise RuntimeError(f"{self.layer} of {len(self.pools)} layers were verified")
        for pool, snapshots in zip(self.pools, self.snapshots, strict=True):
            pool.copy_(snapshots[:, length - 1])
        self.layer = 0
        return sum(pool.nbytes for pool in self.pools)


def generate(
    model: Any,
    prompt: Sequence[int],
    drafter: Drafter,
    *,
    block: int = 16,
    max_new_tokens: int = 64,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Summary:
    """The tokens of greedy generation after a prompt, as many of a block as the drafter guesses at once.

    Args:
        model: Qwen3-Next, Qwen3.5 or Qwen3.5-MoE for text. On a GPU bf16: the kernels take no fp32 tokens.
        prompt: token ids, one at least.
        drafter: (tokens so far, count) -> count draft tokens.
        block: tokens of a verify, the last one that is certain and block - 1 drafts; 2 at least.
        max_new_tokens: exactly so many are generated.
        progress: called with the number of new tokens after each block.
    Raises:
        ValueError: an argument is out of its limits. Shadowed, ImportError: as `patch()`.
    Generations of one process wait for one another, as the modules are patched.
    """
    environment.check()
    import torch

    if block < 2 or max_new_tokens < 1 or not len(prompt):
        raise ValueError(
            f"block is {block}, max_new_tokens {max_new_tokens} and the prompt has {len(prompt)} tokens; "
            "they must be at least 2, 1 and 1"
        )
    from transformers import DynamicCache

    text_config = model.config.get_text_config()
    linear = [i for i, kind in enumerate(text_config.layer_types) if kind == "linear_attention"]
    device = next(model.parameters()).device
    with _one_at_a_time, torch.inference_mode():
        cache = DynamicCache(config=text_config)
        for i in linear:
            cache.layers[i].activate_past_recording()

        def forward(tokens: Sequence[int]) -> list[int]:
            ids = torch.tensor([list(tokens)], device=device)
            return model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0].argmax(-1).tolist()

        result = Summary(tokens=[forward(prompt)[-1]])
        progress(1)
        rewind(cache, linear, 0)
        verifier = Verifier(block)
        verifier.start([cache.layers[i].recurrent_states[0] for i in linear])
        while len(result.tokens) < max_new_tokens:
            drafts = list(drafter([*prompt, *result.tokens], block - 1))
            if len(drafts) != block - 1:
                raise ValueError(f"the drafter gave {len(drafts)} tokens, must give {block - 1}")
            with Verifying(verifier):
                best = forward([result.tokens[-1], *drafts])
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == best[accepted]:
                accepted += 1
            length = accepted + 1
            result.commit_bytes += verifier.commit(length)
            result.snapshot_bytes += sum(x.nbytes for x in verifier.snapshots)
            rewind(cache, linear, block - length)
            new = best[:length][: max_new_tokens - len(result.tokens)]
            result.tokens += new
            result.blocks += 1
            result.drafted += len(drafts)
            result.accepted += accepted
            result.committed += length
            progress(len(new))
    return result


def rewind(cache: Any, linear: Sequence[int], tokens: int) -> None:
    """Forget the last `tokens` of a cache, but for the recurrent states, which are the verifier's."""
    for i, layer in enumerate(cache.layers):
        if tokens or i in linear:  # a linear layer drops there what it recorded
            layer.crop(-tokens)


class Verifying:
    """While it is entered, the chunked function of every model is the verifier."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.before = [(module, getattr(module, CHUNK)) for module in modules()]
        for module, _ in self.before:
            setattr(module, CHUNK, self.verifier)

    def __exit__(self, *_: object) -> None:
        for module, function in self.before:
            setattr(module, CHUNK, function)
