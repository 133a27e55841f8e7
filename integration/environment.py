"""Which packages an interpreter has, and whether they get along; `python -m integration` prints it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

DISTRIBUTION = "hopper-gdn"
SHADOWED = (
    "kernels is Hugging Face's package at {place}, and {distribution} is not installed into it, so that there is no "
    "kernels.verify. That is what an editable install or a checkout on the path comes to where both are: install a "
    "wheel in its place, with `pip install .` (without -e) in the checkout of {distribution}."
)
MISSING = "{distribution} is not installed here: run `pip install .` in its checkout."


class Shadowed(ImportError):
    """`kernels` is another distribution's package, without ours in it. The message says what to do."""


def problem() -> str:
    """ "" if `kernels.verify` can be imported and is ours, else why it is not and what to do."""
    package = importlib.util.find_spec("kernels")
    if package is None:
        return MISSING.format(distribution=DISTRIBUTION)
    places = list(package.submodule_search_locations or ())
    if any((Path(place) / "verify" / "api.py").is_file() for place in places):
        return ""
    if package.origin is None:
        return MISSING.format(distribution=DISTRIBUTION)
    return SHADOWED.format(place=Path(package.origin).parent, distribution=DISTRIBUTION)


def check() -> None:
    """Raises Shadowed, before anything else would fail to import with less to say."""
    if text := problem():
        raise Shadowed(text)


def version(distribution: str) -> str:
    """Of an installed distribution; "" if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
