"""What this checkout generates for every program that a record names: `python -m tests.sources`.

Writes .gates/sources.json, {label: sha256 of the generated CUDA, or "" where the program no longer builds}. The site
shows a recorded outcome whose hash differs as stale.

Generating a source takes seconds, and records name hundreds. So specs/results/lowered.json remembers what the PrimFuncs
of the recorded programs became with the pinned TileLang: {hash of the PrimFunc: sha256 of the CUDA}. A program that is
not in it is lowered. `python -m tests.sources --record` lowers all of them and writes that file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "specs" / "results"
CACHE = ROOT / ".gates" / "sources.json"
LOWERED = RECORDS / "lowered.json"
#: whatever can change a generated source
INPUTS = ("kernels", "probes", "tests/emulator/programs", "tests/bench/traffic.py")


def recorded_labels(folder: Path, patterns: Sequence[str] = ("gate*.json", "bench.*.json")) -> set[str]:
    files = [path for pattern in patterns for path in folder.glob(pattern)]
    return {label for path in files for label in json.loads(path.read_text())["sources"]}


def input_digest() -> str:
    """Hash of every Python file a program is built from and of the compiler's version."""
    digest = hashlib.sha256(importlib.metadata.version("tilelang").encode())
    inputs = [ROOT / name for name in INPUTS]
    files = [file for path in inputs for file in ([path] if path.is_file() else path.rglob("*.py"))]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def generate(labels: Iterable[str], lowered: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """label -> (key, sha256 of the CUDA that this checkout generates): from `lowered` if that knows the key."""
    from tqdm import tqdm

    from kernels import runtime

    runtime.lowered_cache = ROOT / ".cache" / "lowered"
    found = {}
    for label in tqdm(sorted(labels), desc="generating sources", unit="program"):
        try:
            program = runtime.Program.from_label(label)
            key = runtime.lowering_key(program)
            found[label] = key, lowered.get(key) or runtime.lower(program).sha256
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)
            found[label] = "", ""
    return found


def known_hashes(digest_file: Path, digest: str) -> dict[str, str]:
    """What an earlier call generated from the same inputs; nothing if a file is missing or damaged."""
    try:
        return dict(json.loads(CACHE.read_text())) if digest_file.read_text() == digest else {}
    except (OSError, ValueError):
        return {}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"lower all of them and write {LOWERED.name}")
    record = parser.parse_args(arguments).record
    digest_file, digest = CACHE.with_suffix(".inputs"), input_digest()
    known = {} if record else known_hashes(digest_file, digest)
    labels = recorded_labels(RECORDS) | recorded_labels(CACHE.parent)
    lowered = json.loads(LOWERED.read_text()) if LOWERED.exists() and not record else {}
    found = generate(labels - set(known), lowered)
    if record:
        recorded = recorded_labels(RECORDS)
        keys = {key: sha256 for label, (key, sha256) in found.items() if key and label in recorded}
        LOWERED.write_text(json.dumps(dict(sorted(keys.items())), indent=1) + "\n")
    known.update({label: sha256 for label, (_, sha256) in found.items()})
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps({label: known[label] for label in sorted(labels)}, indent=1) + "\n")
    digest_file.write_text(digest)


if __name__ == "__main__":
    main(sys.argv[1:])
