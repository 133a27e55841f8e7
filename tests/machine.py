"""Facts about the machine that the suite runs on, asked for once and never at import time."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import shutil
import subprocess
from pathlib import Path


@functools.cache
def kind() -> str:
    """ "sm90" with a Hopper GPU that torch can use, else "cpu"."""
    import torch

    return "sm90" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "cpu"


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if kind() == "sm90" else f"{platform.machine()} CPU"


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "tilelang", "apache-tvm-ffi", "transformers", "fla-core", "pytest"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    for tool, pattern in (("nvcc", r"release [\d.]+, V([\d.]+)"), ("g++", r"\) ([\d.]+)")):
        match = re.search(pattern, _output(tool, "--version"))
        found[tool] = match[1] if match else "absent"
    return found


def commit(root: Path) -> str:
    """HEAD of the checkout, with "-dirty" if tracked files other than the records differ; "unknown" without git."""
    head = _output("git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD").strip()
    if not head:
        return "unknown"
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":!specs/results")
    return head + ("-dirty" if changed.strip() else "")


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
