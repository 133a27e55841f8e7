"""Runs FlashInfer's unmodified wrappers on the adapters' calls, without a GPU and without kernels.

`python -m tests.bench.peers.flashinfer_dry_run --requests 1 8 --tokens 1 4` prints a JSON object: "calls" that the
wrappers took, "failed" (what they refused and why), "keys" of the kernels that they asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import types

from tests.bench.peers import flashinfer_runtime, found
from tests.bench.peers.flashinfer_build import add_shapes, call_all, pretend_sm90, pretend_target, shapes
from tests.bench.peers.flashinfer_runtime import Kernel


def stand_in_for_cuda_bindings() -> None:
    """The wrappers only wrap a stream's handle with it."""
    parent: types.ModuleType | None = None
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    vars(sys.modules["cuda.bindings.driver"])["CUstream"] = int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_shapes(parser)
    options = parser.parse_args()
    keys: set[str] = set()
    calls = 0

    def find(key: str) -> Kernel:
        keys.add(key)

        def kernel(*tensors: object) -> None:
            nonlocal calls
            calls += 1

        return kernel

    pretend_sm90()
    stand_in_for_cuda_bindings()
    modules = found.load_unpacked("flashinfer", flashinfer_runtime.stand_ins(find))
    pretend_target(modules)
    failed = call_all(modules, shapes(options.heads, options.requests, options.tokens))
    print(json.dumps({"calls": calls, "failed": failed, "keys": sorted(keys)}))


if __name__ == "__main__":
    main()
