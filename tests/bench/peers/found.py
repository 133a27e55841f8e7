"""Where a peer is: an installed package first, else its unpacked files below .peers.

Nothing here imports triton or touches a GPU until a peer's module is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.peers import pins, stand_ins
from tests.bench.peers.pins import PEERS, Peer


class Absent(Exception):
    """The peer cannot run here; the message says why and what would help."""


def _installed(peer: Peer) -> Path | None:
    """The site folder of an installed package that has the files, without importing it."""
    spec = importlib.util.find_spec(peer.top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        site = Path(folder).parent
        if all((site / file).exists() for file in peer.files):
            return site
    return None


def _unpacked(peer: Peer) -> Path | None:
    """The folder below .peers, if it holds the pinned version."""
    if pins.manifest().get(peer.name, {}).get("version") != peer.version:
        return None
    return peer.folder if all((peer.folder / file).exists() for file in peer.files) else None


def is_installed(name: str) -> bool:
    return _installed(PEERS[name]) is not None


def label(name: str) -> str:
    """ "<peer>-<version>" of what `modules` would load; the pinned version if it is not here."""
    peer = PEERS[name]
    if not is_installed(name):
        return f"{name}-{peer.version}"
    return f"{name}-{importlib.metadata.version(peer.package)}"


def _remedy(peer: Peer) -> str:
    return f"install {peer.package}=={peer.version}, or run nox -s peers -- {peer.name}"


@functools.cache
def modules(name: str) -> tuple[types.ModuleType, ...]:
    """The peer's modules in the order of its `modules`. Raises Absent."""
    peer = PEERS[name]
    installed = _installed(peer)
    folder = None if installed else _unpacked(peer)
    if not installed and folder is None:
        raise Absent(f"not here: {_remedy(peer)}")
    try:
        if folder is None:
            return tuple(importlib.import_module(module) for module in peer.modules)
        return load_unpacked(name, stand_ins.of(name))
    except Exception as error:
        which = "the installed" if installed else "the unpacked"  # a path would end up in the record
        reason = (str(error).strip().splitlines() or [""])[0]
        raise Absent(f"not here: {which} {name} does not import: {type(error).__name__}: {reason}") from error


def absence(name: str) -> str:
    """ "" if the peer's modules import, else why they do not."""
    try:
        modules(name)
    except Absent as reason:
        return str(reason)
    return ""


def missing(name: str) -> str:
    """Like `absence`, for a peer that another process imports: looks at files only."""
    peer = PEERS[name]
    return "" if _installed(peer) or _unpacked(peer) else f"not here: {_remedy(peer)}"


def unpacked_folder(name: str) -> Path | None:
    """The folder of unpacked files that would be used, None if the package is installed or absent."""
    peer = PEERS[name]
    return None if _installed(peer) else _unpacked(peer)


def load_unpacked(name: str, others: dict[str, dict[str, Any]]) -> tuple[types.ModuleType, ...]:
    """Import the modules of an unpacked, incomplete package: its own __init__ files are not executed.

    Args:
        others: what the files import from the rest of the package; module name -> attributes, parents first.
    """
    peer = PEERS[name]
    with _own_names(peer.top):
        for parent in {parent for file in peer.files for parent in Path(file).parents if parent.parts}:
            _package(".".join(parent.parts), peer.folder / parent)
        vars(sys.modules[peer.top])["__version__"] = peer.version
        for other, members in others.items():
            _package(other, None, members)
        return tuple(importlib.import_module(module) for module in peer.modules)


def _package(name: str, folder: Path | None, members: dict[str, Any] | None = None) -> None:
    """Put a package without an __init__ into sys.modules unless it is there; `members` become its attributes."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(members or {})


@contextlib.contextmanager
def _own_names(top: str) -> Iterator[None]:
    """Modules below `top` that are imported inside leave sys.modules again: nobody takes them for the real package."""

    def below() -> list[str]:
        return [name for name in sys.modules if name == top or name.startswith(top + ".")]

    before = {name: sys.modules.pop(name) for name in below()}
    try:
        yield
    finally:
        for name in below():
            del sys.modules[name]
        sys.modules.update(before)
