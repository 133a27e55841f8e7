"""What this checkout generates for every program that a record names: `python -m tests.sources`.

Writes .gates/sources.json, {label: sha256 of the generated CUDA, or "" where the program no longer builds}. The site
shows a recorded outcome whose hash differs as stale.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "specs" / "results"
CACHE = ROOT / ".gates" / "sources.json"
#: whatever can change a generated source
INPUTS = ("kernels", "probes", "tests/emulator/programs", "tests/bench/traffic.py")


def recorded_labels(folder: Path) -> set[str]:
    files = [path for pattern in ("gate*.json", "bench.*.json") for path in folder.glob(pattern)]
    return {label for path in files for label in json.loads(path.read_text())["sources"]}


def input_digest() -> str:
    """Hash of every Python file a program is built from and of the compiler's version."""
    digest = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    inputs = [ROOT / name for name in INPUTS]
    files = [file for path in inputs for file in ([path] if path.is_file() else path.rglob("*.py"))]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def generate(labels: Iterable[str]) -> dict[str, str]:
    """label -> sha256 of the CUDA that this checkout generates."""
    from tqdm import tqdm

    from kernels import runtime

    runtime.lowered_cache = ROOT / ".cache" / "lowered"
    hashes = {}
    for label in tqdm(sorted(labels), desc="generating sources", unit="program"):
        try:
            hashes[label] = runtime.lower(runtime.Program.from_label(label)).sha256
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)
            hashes[label] = ""
    return hashes


def known_hashes(digest_file: Path, digest: str) -> dict[str, str]:
    """What an earlier call generated from the same inputs; nothing if a file is missing or damaged."""
    try:
        return dict(json.loads(CACHE.read_text())) if digest_file.read_text() == digest else {}
    except (OSError, ValueError):
        return {}


def main() -> None:
    digest_file, digest = CACHE.with_suffix(".inputs"), input_digest()
    known = known_hashes(digest_file, digest)
    labels = recorded_labels(RECORDS) | recorded_labels(CACHE.parent)
    known.update(generate(labels - set(known)))
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps({label: known[label] for label in sorted(labels)}, indent=1) + "\n")
    digest_file.write_text(digest)


if __name__ == "__main__":
    main()
