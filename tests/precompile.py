"""Compile without a GPU: what the records name, for a GPU machine, or what the wheel carries.

`python -m tests.precompile [2 5 bench ...]` or `nox -s precompile`: the kernels go to the disk cache of
kernels/libraries.py, other programs to TileLang's (TILELANG_CACHE_DIR, else ~/.tilelang/cache). Copies of both folders
on a machine with a GPU, with the same TileLang, spare it minutes of compilation.
`python -m tests.precompile --wheel`: kernels/prebuilt/ then holds the libraries of kernels/served.py and no others.
"""

from __future__ import annotations

import argparse
import functools
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


def compiled(label: str, folder: Path | None = None) -> str:
    """Compile a program into `folder`, else into the caches, unless it is there; "" or why it could not be."""
    from kernels import libraries, runtime

    try:
        program = runtime.Program.from_label(label)
        if folder is None:
            runtime.executable(program)
        elif libraries.find(folder, label) is None:
            runtime.compile_into(program, folder)
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error}"
    return ""


def of_the_wheel(folder: Path) -> list[str]:
    """Labels of the programs that the wheel carries; what else lies in `folder` is removed."""
    from kernels import libraries, served

    labels = [program.label for program in served.in_the_wheel()]
    wanted = {path for label in labels for path in libraries.paths(folder, label)}
    for path in set(folder.glob("*")) - wanted:
        path.unlink()
    return labels


def main(arguments: Sequence[str]) -> int:
    """1 if a program could not be compiled, else 0."""
    from tqdm import tqdm

    from kernels import libraries

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="*", help=f"numbers of gates, or {BENCH!r}; all records if left out")
    parser.add_argument("--wheel", action="store_true", help="what the wheel carries, into kernels/prebuilt/")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    if options.wheel and options.records:
        parser.error("--wheel has programs of its own: name no records beside it")
    folder = libraries.PREBUILT if options.wheel else None
    try:
        labels = of_the_wheel(folder) if folder else named_by(options.records, options.folder)
    except FileNotFoundError as error:
        parser.error(str(error))
    # a process that has loaded TileLang must not be forked
    with ProcessPoolExecutor(max(options.jobs, 1), multiprocessing.get_context("spawn")) as pool:
        results = pool.map(functools.partial(compiled, folder=folder), labels)
        errors = [error for error in tqdm(results, desc="compiling", unit="program", total=len(labels)) if error]
    print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
    print(f"{len(labels) - len(errors)} of {len(labels)} programs are in {folder or 'the disk caches'}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
