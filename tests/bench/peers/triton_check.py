"""`python -m tests.bench.peers.triton_check sglang` compares the peer's own kernels, called by the adapters, with fp64.

Without a GPU they run in Triton's interpreter. Prints one JSON object: "<entry> <op> <pool>" -> errors, or why not.
"""

from __future__ import annotations

import argparse
import json
import os
from types import ModuleType
from typing import Any

import torch

from tests.bench import check
from tests.bench.implementation import Unsupported
from tests.bench.peers import fla, found, sglang, vllm
from tests.bench.peers.entry import Entry
from tests.bench.problem import Problem, Shape

ENTRIES: dict[str, tuple[type[Entry], ...]] = {"sglang": sglang.ENTRIES, "vllm": vllm.ENTRIES, "fla": fla.ENTRIES}
POOLS = ("bf16", "fp32")


class SaysCuda(torch.Tensor):
    """A CPU tensor for a wrapper that refuses other devices than CUDA; the interpreter takes it as it is."""

    is_cuda = True


def adapt_to_interpreter(module: ModuleType) -> None:
    """The interpreter replaces the functions of triton.language, and so misses one that was imported by name."""
    if "exp" in vars(module):
        vars(module)["exp"] = lambda x: vars(module)["tl"].exp(x)


def errors_of(entry: Entry, shape: Shape, device: torch.device) -> dict[str, float] | str:
    problem = Problem(shape, device, l2_bytes=1)
    if device.type == "cpu" and shape.op == "commit":
        problem.pool = problem.pool.as_subclass(SaysCuda)
    try:
        return check.run_and_compare(problem, entry.bind(problem))
    except Unsupported as reason:
        return f"not supported: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=ENTRIES)
    peer = parser.parse_args().peer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    results: dict[str, Any] = {}
    for entry in (entry_type() for entry_type in ENTRIES[peer]):
        absent = entry.absent()
        if device.type == "cpu" and not absent:
            for module in found.modules(peer):
                adapt_to_interpreter(module)
        for op in sorted(entry.ops):
            for pool in POOLS if op != "decode-dense" else ("fp32",):
                shape = Shape(op, N=2, T=1 if op == "decode" else 3, H=1, HV=2, pool=pool, cold=False)
                results[f"{entry.name} {op} {pool}"] = absent or errors_of(entry, shape, device)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
