"""`python -m integration`: what this environment has, and what to do where it does not fit. Exit status 1 then."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from integration import environment

#: framework -> its distribution, versions tried, and the entry-point group that loads the adapter ("": one calls it)
FRAMEWORKS = {
    "SGLang": ("sglang", "0.5.23", "sglang.srt.plugins"),
    "vLLM": ("vllm", "0.33.0", "vllm.general_plugins"),
    "transformers": ("transformers", "5.17 to 5.24", ""),
}


def device() -> str:
    """What runs the kernels here."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: CPU tensors compute the reference"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if (major, minor) == (9, 0):
        return f"{name}, SM90: the kernels run"
    return f"{name}, SM{major}{minor}: the kernels need SM90 (Hopper)"


def plugin(group: str) -> str:
    """Whether our entry point of a framework's plugin group is visible."""
    if not group:
        return "call integration.transformers.patch()"
    found = [point for point in importlib.metadata.entry_points(group=group) if point.name == "hopper_gdn"]
    return (
        f"entry point {found[0].value}"
        if found
        else f"no entry point in {group}: {environment.DISTRIBUTION} is not installed"
    )


def lines() -> list[str]:
    """The report, a line each."""
    text = [
        f"{environment.DISTRIBUTION} {environment.version(environment.DISTRIBUTION) or '(not installed: a checkout)'}"
    ]
    text += [f"  {name} {environment.version(name) or 'is not installed'}" for name in ("torch", "tilelang", "kernels")]
    text.append(f"  device: {device()}")
    for framework, (distribution, tried, group) in FRAMEWORKS.items():
        version = environment.version(distribution)
        text.append(f"{framework} {version or 'is not installed'} (tried: {tried}); {plugin(group)}")
    return text


def main() -> None:
    argparse.ArgumentParser(prog="python -m integration", description=__doc__).parse_args()
    print("\n".join(lines()))
    if text := environment.problem():
        sys.exit(f"PROBLEM: {text}")
    print("kernels.verify can be imported.")


if __name__ == "__main__":
    main()
