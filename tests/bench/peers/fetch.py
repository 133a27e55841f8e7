"""Fetches the peers: their released wheels, of which only the needed files are kept, below .peers (`nox -s peers`).

Runs on x86-64 Linux with a network and without a GPU. FlashInfer's kernels are compiled ahead of time, which takes
about ten minutes on two cores. The result is also packed, for a machine that has a GPU and no network:

    mkdir -p .peers && tar xJf peers.tar.xz -C .peers

An interrupted run loses nothing: run it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.peers import flashinfer_build, flashinfer_link, pins
from tests.bench.peers.pins import PEERS, Peer
from tests.bench.peers.wheels import FetchError, download, say, sha256, unpack, write_manifest

ARCHIVE, ARCHIVE_LIMIT = "peers.tar.xz", 15e6


def fetch(peer: Peer) -> None:
    """Download and unpack a peer unless its pinned version is there."""
    entry = pins.manifest().get(peer.name, {})
    files = entry.get("files", [])
    if entry.get("version") == peer.version and files and all((peer.folder / file).exists() for file in files):
        say(f"{peer.package} {peer.version}: is there")
        return
    wheel = download(peer.package, peer.version)
    files = unpack(wheel, peer.files, peer.folder)
    write_manifest(peer.name, {"version": peer.version, "wheel": wheel.name, "sha256": sha256(wheel), "files": files})
    say(f"{peer.package} {peer.version}: {len(files)} files in {peer.folder.relative_to(pins.ROOT)}")
    wheel.unlink()


def pack() -> Path:
    """Everything that is fetched in one archive. Raises FetchError if it is too large to carry about."""
    archive = pins.FOLDER / ARCHIVE
    written = archive.with_suffix(".new")
    with tarfile.open(written, "w:xz") as tar:
        tar.add(pins.FOLDER / pins.MANIFEST, pins.MANIFEST)
        for name in sorted(pins.manifest()):
            for path in sorted(PEERS[name].folder.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    tar.add(path, str(path.relative_to(pins.FOLDER)))
    os.replace(written, archive)
    size = archive.stat().st_size
    if size > ARCHIVE_LIMIT:
        raise FetchError(
            f"{archive} has {size / 1e6:.1f} MB, more than {ARCHIVE_LIMIT / 1e6:.0f}: remove .peers/build and build "
            "fewer shapes at once (--heads, --requests, --tokens)."
        )
    return archive


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(PEERS)}")
    here = ".".join(map(str, sys.version_info[:2]))
    pythons = sorted({here, "3.12"})
    parser.add_argument(
        "--python", nargs="+", default=pythons, help=f"versions that will run FlashInfer (default: {' '.join(pythons)})"
    )
    flashinfer_build.add_shapes(parser)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PEERS]:
        parser.error(f"no peer is called {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        pins.FOLDER.mkdir(exist_ok=True)
        for name in options.names or PEERS:
            fetch(PEERS[name])
            if name == "flashinfer":
                flashinfer_link.build(options)
        archive = pack()
    except FetchError as error:
        sys.exit(f"peers: {error}")
    except KeyboardInterrupt:
        sys.exit("peers: interrupted; run the same command again to go on")
    say(f"{archive.relative_to(pins.ROOT)}: {archive.stat().st_size / 1e6:.2f} MB, for a machine without network:")
    say(f"    mkdir -p .peers && tar xJf {archive.name} -C .peers")


if __name__ == "__main__":
    main()
