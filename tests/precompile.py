"""Compile what the records name, without a GPU: `python -m tests.precompile [2 5 bench ...]`, or `nox -s compile`.

TileLang keeps the results in its disk cache (TILELANG_CACHE_DIR, else ~/.tilelang/cache). A copy of that folder on a
machine with a GPU, with the same TileLang, spares it minutes of compilation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.sources import RECORDS, recorded_labels

BENCH = "bench"


def named_by(records: Sequence[str], folder: Path = RECORDS) -> list[str]:
    """Labels of the programs in the records of these gates (their numbers) or of the benchmark; if none is named, all.

    Raises FileNotFoundError for a name without a record.
    """
    if not records:
        return sorted(recorded_labels(folder))
    patterns = ["bench.*.json" if name == BENCH else f"gate{name}.*.json" for name in records]
    for name, pattern in zip(records, patterns, strict=True):
        if not any(folder.glob(pattern)):
            raise FileNotFoundError(f"{folder} has no record {name!r}: give numbers of gates, or {BENCH!r}")
    return sorted(recorded_labels(folder, patterns))


def compiled(label: str) -> str:
    """Compile a program into the cache; "" or why it could not be."""
    from kernels import runtime

    try:
        runtime.executable(runtime.Program.from_label(label))
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """1 if a program could not be compiled, else 0."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="*", help=f"numbers of gates, or {BENCH!r}; all records if left out")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    try:
        labels = named_by(options.records, options.folder)
    except FileNotFoundError as error:
        parser.error(str(error))
    # a process that has loaded TileLang must not be forked
    with ProcessPoolExecutor(max(options.jobs, 1), multiprocessing.get_context("spawn")) as pool:
        results = tqdm(pool.map(compiled, labels), desc="compiling", unit="program", total=len(labels))
        errors = [error for error in results if error]
    print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
    print(f"{len(labels) - len(errors)} of {len(labels)} programs are in TileLang's cache")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
