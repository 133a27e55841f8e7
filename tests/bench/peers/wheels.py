"""Wheels by name: downloaded by pip, checked, unpacked in part; and the errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.peers import pins

WHEELS = "wheels"
#: the oldest first; the peers' wheels name one of these
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 34))
AGAIN = "then run the same command again: what is there is kept"


class FetchError(Exception):
    """The message names the remedy."""


def say(text: str) -> None:
    print(text, flush=True)


def run(command: Sequence[str | Path], remedy: str, **environment: str) -> None:
    """Raises FetchError if the command fails; what it printed stays on the terminal."""
    status = subprocess.run([*map(str, command)], cwd=pins.ROOT, env={**os.environ, **environment}).returncode
    if status:
        shown = " ".join(map(str, command[:6]))
        raise FetchError(f"`{shown} ...` failed with status {status}; it says why above. {remedy}")


def pip(*arguments: str | Path) -> None:
    """The running interpreter's pip."""
    run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        f"Check the network and the package index (PIP_INDEX_URL), {AGAIN}.",
    )


def download(package: str, version: str, python: str = "3.12") -> Path:
    """The wheel of a package for x86-64 Linux, in .peers/wheels. Raises FetchError."""
    folder = pins.FOLDER / WHEELS / python
    pattern = f"{re.sub(r'[-_.]+', '_', package)}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        say(f"{package} {version}: downloading")
        platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
        only = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
        pip("download", *only, "--dest", folder, f"{package}=={version}")
    wheels = list(folder.glob(pattern))
    if not wheels:
        raise FetchError(f"pip left no {pattern} in {folder}. Remove that folder, {AGAIN}.")
    return wheels[0]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(wheel: Path, files: Iterable[str], folder: Path) -> list[str]:
    """Extract files ("x/" for all below x) and licences of a wheel into `folder`. Raises FetchError."""
    try:
        archive = zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, OSError) as error:
        raise FetchError(f"{wheel} cannot be read ({error}). Remove it, {AGAIN}.") from error
    with archive:
        names = archive.namelist()
        chosen: list[str] = []
        for file in files:
            matching = [name for name in names if name == file or (file.endswith("/") and name.startswith(file))]
            if not matching:
                raise FetchError(f"{wheel.name} has no {file}: tests/bench/peers/pins.py does not fit this version.")
            chosen += [name for name in matching if not name.endswith("/")]
        chosen += [name for name in names if re.fullmatch(r"[^/]+\.dist-info/(licenses/)?(LICENSE|NOTICE)[^/]*", name)]
        for name in chosen:
            archive.extract(name, folder)
    return sorted(chosen)


def write_manifest(name: str, entry: dict[str, Any]) -> None:
    path = pins.FOLDER / pins.MANIFEST
    written = path.with_suffix(".new")
    written.write_text(json.dumps({**pins.manifest(), name: entry}, indent=1, sort_keys=True) + "\n")
    os.replace(written, path)
