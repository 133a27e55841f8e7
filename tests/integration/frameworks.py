"""The frameworks that gate 6 runs against: the Python files of their released wheels, below .frameworks.

    nox -s frameworks                  all that is missing (network); gate 6 and the suite do it first

None is installed: they need CUDA builds of much else. A test puts the folder of one on the path of a process of its own
(`folder`), or hands the wheel as it is to pip (`wheel`). An interrupted run loses nothing: run it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peers.wheels import FetchError, download, say

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".frameworks"
STAMP = "hopper-gdn.stamp"  # written last: without it a folder is not complete
#: what is kept of a wheel: code, and metadata with its entry points and licences
KEPT = (".py", ".json")


@dataclasses.dataclass(frozen=True)
class Framework:
    package: str
    version: str
    whole: bool = False  # keeps the wheel too, for the running interpreter

    @property
    def name(self) -> str:
        return f"{self.package}-{self.version}"


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("sglang", "0.5.23"),
        Framework("vllm", "0.33.0"),
        Framework("transformers", "5.17.0"),
        Framework("transformers", "5.19.0"),
        Framework("kernels", "0.14.1", whole=True),  # SGLang 0.5.23 asks for this one
        Framework("kernels-data", "0.16.2", whole=True),  # which needs it
        Framework("kernels", "0.18.3", whole=True),  # transformers 5.24 asks for it; has a module kernels/verify.py
        Framework("kernels", "0.19.1", whole=True),  # the newest
    )
}


class Absent(Exception):
    """The message says what to run."""


def folder(name: str) -> Path:
    """Where "<package>-<version>" is unpacked, to be put on a path. Raises Absent."""
    place = FOLDER / FRAMEWORKS[name].name
    if not (place / STAMP).exists():
        raise Absent(f"{name} is not here: run nox -s frameworks")
    return place


def wheel(name: str) -> Path:
    """The wheel of a framework that is kept whole. Raises Absent."""
    (found,) = folder(name).glob("*.whl")
    return found


def fetch(framework: Framework) -> None:
    """Download and unpack a framework unless it is here. Raises FetchError."""
    place = FOLDER / framework.name
    if (place / STAMP).exists():
        return
    python = {"python": ".".join(map(str, sys.version_info[:2]))} if framework.whole else {}
    source = download(framework.package, framework.version, **python)
    unfinished = FOLDER / f"{framework.name}.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    with zipfile.ZipFile(source) as archive:
        names = [n for n in archive.namelist() if n.endswith(KEPT) or ".dist-info/" in n]
        for name in names:
            archive.extract(name, unfinished)
    if framework.whole:
        shutil.copy(source, unfinished)
    (unfinished / STAMP).write_text(source.name + "\n")
    os.replace(unfinished, place)
    source.unlink()
    say(f"{framework.package} {framework.version}: {len(names)} files in {place.relative_to(ROOT)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(FRAMEWORKS)}")
    names = parser.parse_args(arguments).names
    if unknown := [name for name in names if name not in FRAMEWORKS]:
        parser.error(f"no framework is called {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    try:
        for name in names or FRAMEWORKS:
            fetch(FRAMEWORKS[name])
    except FetchError as error:
        sys.exit(f"frameworks: {error}")
    except KeyboardInterrupt:
        sys.exit("frameworks: interrupted; run the same command again to go on")


if __name__ == "__main__":
    main()
