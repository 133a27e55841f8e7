"""How far states drift from fp64 over 10,000 tokens: `python -m tests.reference.ring_drift [--record]`.

One random sequence is fed on a bf16 pool in three ways, in fp32 arithmetic. Of every token the state that its output is
read from is compared with the one of an fp64 recurrence, as a relative L2 distance:

- decode: a token a call, in place; the state is rounded after every token.
- commit: verify calls that store nothing, and commits of the accepted tokens; rounded once a commit.
- ring: verify behind a history of accepted tokens; rounded when the history is folded (`reference/ring.py`).

`--record` writes specs/results/ring-drift.json, which the page specs/design/replay.md draws.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.recurrence import recurrent
from tests.reference.cases import rel_l2
from tests.reference.drift import HV, POOL, SEED, Inputs, K, V, draw

RECORD = Path(__file__).resolve().parents[2] / "specs" / "results" / "ring-drift.json"
TOKENS = 10_000
SPAN = 100  # tokens that a point of a curve is the mean of
BLOCK = 4  # tokens of a verify call; 1 to all of them are accepted
CAPACITY = 16  # tokens of history

#: of each block of accepted tokens the fp32 states behind them, and the pool as the call leaves it
Steps = Iterator[tuple[Tensor, Tensor]]


def accepted() -> list[slice]:
    """The tokens of every block, of random length."""
    rng = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(1, BLOCK + 1, (TOKENS,), generator=rng)
    ends = [0, *(end for end in lengths.cumsum(0).tolist() if end < TOKENS), TOKENS]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def states_after(x: Inputs, fed: slice, before: Tensor) -> Tensor:
    """The state after each of these tokens, [T, HV, V, K]."""
    q, k, v, g, beta = (getattr(x, f.name)[fed] for f in dataclasses.fields(x))
    return recurrent(q, k, v, g, beta, before)[1]


def empty() -> Tensor:
    return torch.zeros(HV, V, K, dtype=POOL)


def decode(x: Inputs, blocks: list[slice]) -> Steps:
    pool = empty()
    for block in blocks:
        states = []
        for t in range(block.start, block.stop):
            states.append(states_after(x, slice(t, t + 1), pool.float())[-1])
            pool = states[-1].to(POOL)
        yield torch.stack(states), pool


def commit(x: Inputs, blocks: list[slice]) -> Steps:
    pool = empty()
    for block in blocks:
        states = states_after(x, block, pool.float())
        pool = states[-1].to(POOL)
        yield states, pool


def ring(x: Inputs, blocks: list[slice]) -> Steps:
    pool, start = empty(), 0  # the history begins with token `start`
    behind = pool.float()  # the state behind it
    for block in blocks:
        states = states_after(x, block, behind)
        yield states, pool
        if block.stop - start <= CAPACITY:
            behind = states[-1]
        else:  # the next call folds the history, and this block begins another
            pool, start = behind.to(POOL), block.start
            behind = states_after(x, block, pool.float())[-1]


ENGINES = {"ring": ring, "commit": commit, "decode": decode}


def errors(tokens: int = TOKENS) -> dict[str, Tensor]:
    """Engine -> relative L2 distance of its state from fp64, for each of the first `tokens` tokens."""
    raw, blocks = draw(TOKENS), accepted()
    x, exact = raw.prepared(torch.float32), raw.prepared(torch.float64)
    running = {name: engine(x, blocks) for name, engine in ENGINES.items()}
    found: dict[str, list[float]] = {name: [] for name in ENGINES}
    S = empty().double()
    for block in blocks:
        if block.start >= tokens:
            break
        expected = states_after(exact, block, S)
        S = expected[-1]
        for name, steps in running.items():
            states, _ = next(steps)
            found[name] += [rel_l2(*pair) for pair in zip(states, expected, strict=True)]
    return {name: torch.tensor(values[:tokens], dtype=torch.float64) for name, values in found.items()}


def compute(points: int = TOKENS // SPAN) -> dict[str, dict[str, list[float]]]:
    """`curves` and `peaks`: mean and maximum of each of the first `points` spans, for every engine."""
    spans = {name: values.view(points, SPAN) for name, values in errors(points * SPAN).items()}

    def listed(values: Tensor) -> list[float]:
        return [float(f"{value:.3e}") for value in values.tolist()]

    return {
        "curves": {name: listed(span.mean(1)) for name, span in spans.items()},
        "peaks": {name: listed(span.amax(1)) for name, span in spans.items()},
    }


def record() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "tokens": TOKENS,
        "span": SPAN,
        "block": BLOCK,
        "capacity": CAPACITY,
        **compute(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    keep = parser.parse_args(arguments).record
    made = record()
    if keep:
        RECORD.write_text(json.dumps(made, indent=1) + "\n")
    for name, curve in made["curves"].items():
        print(f"{name}: {curve[0]:.2e} in the first {SPAN} tokens, {curve[-1]:.2e} in the last")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
