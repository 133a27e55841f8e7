"""What a new process pays before the first result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate_engine import Evidence

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ("kernels.decode", "kernels.prepass", "kernels.replay", "kernels.verify")


@pytest.mark.criterion("8.30")
def test_import_touches_neither_tilelang_nor_a_device(evidence: Evidence) -> None:
    script = f"""
import json, os, sys
class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)
import torch
before, read = set(sys.modules), []
os.environ.__class__ = Watched
{chr(10).join(f"import {name}" for name in PUBLIC)}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = sorted(new & {{"tilelang", "tvm", "tvm_ffi", "triton"}})
print(json.dumps([foreign, torch.cuda.is_initialized(), [key for key in read if not key.startswith("PYTHON")]]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    compilers, initialised, variables = json.loads(done.stdout)
    evidence.equal("compilers that import loads", compilers, [])
    evidence.equal("CUDA is initialised by import", initialised, False)
    evidence.equal("environment variables that import reads", variables, [])
