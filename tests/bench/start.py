"""What a new process waits for: `python -m tests.bench.start` prints the seconds of its first verify call as JSON.

They count from the moment torch and the caller's tensors are there to the moment the outputs are: the import of
kernels.verify, the compilation with TileLang's import (or, with a warm disk cache, the load alone) and the call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def first_call_in_new_process(cache: Path) -> float:
    """Seconds, in a new process that keeps what it compiles in `cache`. Raises RuntimeError with its error."""
    caches = {"TILELANG_CACHE_DIR": str(cache / "tilelang"), "HOPPER_GDN_CACHE": str(cache / "kernels")}
    environment = os.environ | caches | {"HOPPER_GDN_PREBUILT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.start"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the first call failed: {done.stderr.strip()[-500:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    import torch

    from tests.bench.problem import Problem, Shape

    problem = Problem(Shape("verify-snapshots", 1, 12), torch.device("cuda"), l2_bytes=1)
    states = problem.snapshots[0]
    o = problem.o
    torch.cuda.synchronize()
    start = time.perf_counter()
    from kernels.verify import fused_recurrent_gdr_verify_gated_fwd

    fused_recurrent_gdr_verify_gated_fwd(
        problem.q, problem.k, problem.v, problem.a, problem.b, problem.A_log, problem.dt_bias, problem.pool,
        problem.indices[0], problem.cu_seqlens, o, states, problem.rows,
    )  # fmt: skip
    torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
