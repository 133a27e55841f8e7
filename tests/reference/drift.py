"""How far verify calls drift from decode over 1,000 tokens: `python -m tests.reference.drift [--record]`.

Every token is fed once by calls of one token (decode) and once by calls of `BLOCK` tokens (verify, all drafts
accepted), on a bf16 pool, in fp32 arithmetic; the relative L2 distance of the two stored states is taken after every
block. Each engine is compared with its own decode:

- stock: the recurrence carries fp32 through a block; its decode rounds beta to bf16, its verify does not.
- chunk: the chunk form, fp32 through a block, the same beta in both.
- lossless: the recurrence, rounded after every token.

`--record` writes specs/results/drift.json, which the page specs/design/lossless.md draws.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.chunk import chunked
from reference.gating import gates, l2norm
from reference.lossless import stored_as
from reference.recurrence import Recurrence, recurrent
from tests.reference.cases import rel_l2

RECORD = Path(__file__).resolve().parents[2] / "specs" / "results" / "drift.json"
POOL = torch.bfloat16
BLOCK = 12  # tokens of a verify call
BLOCKS = 84
SEED = 7
H, HV, K, V = 2, 8, 128, 128


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: Tensor  # [T, H, K], normalised
    k: Tensor
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor


@dataclasses.dataclass(frozen=True)
class Raw:
    """A sequence as a kernel is given it."""

    q: Tensor  # [T, H, K]
    k: Tensor
    v: Tensor  # [T, HV, V]
    a: Tensor  # [T, HV]
    b: Tensor
    A_log: Tensor  # [HV]
    dt_bias: Tensor

    def prepared(self, dtype: torch.dtype) -> Inputs:
        """As a recurrence is given it, computed in `dtype`."""
        q, k, v, a, b, A_log, dt_bias = (getattr(self, f.name).to(dtype) for f in dataclasses.fields(self))
        return Inputs(l2norm(q), l2norm(k), v, *gates(A_log, a, dt_bias, b))


def draw(T: int) -> Raw:
    """A random sequence of T tokens.

    Decay as these models are initialised: A = exp(A_log) uniform in (1, 16), and dt = softplus(dt_bias) log-uniform in
    (0.001, 0.1), so that some heads remember a thousand tokens and others ten.
    """
    rng = torch.Generator().manual_seed(SEED)
    A_log = torch.log(1 + 15 * torch.rand(HV, generator=rng))
    dt = torch.exp(math.log(1e-3) + math.log(100.0) * torch.rand(HV, generator=rng))
    dt_bias = dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
    q, k = (torch.randn(T, H, K, generator=rng).to(POOL) for _ in range(2))
    v = torch.randn(T, HV, V, generator=rng).to(POOL)
    a, b = (torch.randn(T, HV, generator=rng).to(POOL) for _ in range(2))
    return Raw(q, k, v, a, b, A_log, dt_bias)


def inputs(blocks: int) -> Inputs:
    """The first `blocks` blocks of one random sequence."""
    x = draw(BLOCKS * BLOCK).prepared(torch.float32)
    return Inputs(*(getattr(x, f.name)[: blocks * BLOCK] for f in dataclasses.fields(x)))


def stored_states(x: Inputs, recurrence: Recurrence, tokens: int) -> list[Tensor]:
    """The pool after every block, when calls of `tokens` tokens are made; [HV, V, K] each, in the pool's dtype."""
    pool, after = torch.zeros(HV, V, K, dtype=POOL), []
    for start in range(0, len(x.g), tokens):
        call = slice(start, start + tokens)
        _, states = recurrence(x.q[call], x.k[call], x.v[call], x.g[call], x.beta[call], pool.float())
        pool = states[-1].to(POOL)
        if (start + tokens) % BLOCK == 0:
            after.append(pool)
    return after


def compute(blocks: int = BLOCKS) -> dict[str, list[float]]:
    """engine -> relative L2 distance between its verify and its decode, after each of the first `blocks` blocks."""
    x = inputs(blocks)
    rounded = dataclasses.replace(x, beta=x.beta.to(POOL).float())
    decode, stock_decode = stored_states(x, recurrent, 1), stored_states(rounded, recurrent, 1)
    chunk_form: Recurrence = functools.partial(chunked, chunk_size=16)
    verify = {
        "stock": (stored_states(x, recurrent, BLOCK), stock_decode),
        "chunk": (stored_states(x, chunk_form, BLOCK), decode),
        "lossless": (stored_states(x, stored_as(POOL), BLOCK), decode),
    }
    return {
        name: [float(f"{rel_l2(state, expected):.3e}") for state, expected in zip(*pair, strict=True)]
        for name, pair in verify.items()
    }


def record() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "block": BLOCK,
        "curves": compute(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    keep = parser.parse_args(arguments).record
    made = record()
    if keep:
        RECORD.write_text(json.dumps(made, indent=1) + "\n")
    for name, curve in made["curves"].items():
        print(f"{name}: {curve[0]:.2e} after {BLOCK} tokens, {curve[-1]:.2e} after {BLOCK * len(curve)}")


if __name__ == "__main__":
    main()
