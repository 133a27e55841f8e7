"""The numbered criteria in the front matter of the gate pages."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import yaml

CRITERION = re.compile(r"(\d+)\.\d+")


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is listed twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} is listed twice")
        return super().construct_mapping(node, deep)


def load_criteria(pages: Path) -> dict[str, str]:
    """Criterion id -> its sentence, over all gate pages. Raises UsageError on a malformed page or a duplicate id."""
    criteria: dict[str, str] = {}
    for page in sorted(pages.glob("gate*.md")):
        try:
            front = yaml.load(page.read_text().split("---", 2)[1], UniqueKeys)
            gate, listed = front["gate"], dict(front["criteria"])
        except (yaml.YAMLError, IndexError, KeyError, TypeError, ValueError) as error:
            raise pytest.UsageError(f"{page.name}: front matter without gate and criteria: {error}") from error
        if page.stem != f"gate{gate}":
            raise pytest.UsageError(f"{page.name}: this page must be of gate {page.stem[4:]}, not {gate}")
        for key, text in listed.items():
            match = CRITERION.fullmatch(key) if isinstance(key, str) else None
            if match is None or match[1] != str(gate):
                raise pytest.UsageError(f"{page.name}: criterion {key!r} is not a string '{gate}.<n>'")
            if not isinstance(text, str) or not text.strip():
                raise pytest.UsageError(f"{page.name}: criterion {key} has no sentence")
        criteria |= listed
    return criteria


def gate_of(criterion: str) -> int:
    return int(criterion.split(".")[0])


def sort_key(criterion: str) -> tuple[int, ...]:
    return tuple(int(part) for part in criterion.split("."))
