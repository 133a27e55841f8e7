"""Edits of generated source for negative controls; an edit that changes nothing is an error."""

import re
from collections.abc import Callable


def replace(pattern: str, replacement: str, *, count: int = 1) -> Callable[[str], str]:
    """A patch that substitutes the first `count` matches (0: all) of a regular expression."""

    def patch(source: str) -> str:
        edited, changes = re.subn(pattern, replacement, source, count=count)
        if not changes:
            raise AssertionError(f"the generated source has no {pattern!r} to edit")
        return edited

    return patch
