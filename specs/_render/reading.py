"""Files read strictly: what a file fails to say is an error, never a guess."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class SiteError(ValueError):
    """An input of the site is missing, malformed or contradicts itself. The message names the file."""


@dataclass(frozen=True)
class Run:
    """One run on one machine: what a gate record and a benchmark record have in common."""

    recorded: bool  # True: in specs/results; False: the last run in this checkout (.gates)
    file: str
    device: str
    date: str
    when: datetime.datetime
    commit: str
    versions: Mapping[str, str]
    sources: Mapping[str, str]  # program label -> sha256 of its generated CUDA
    machine: str

    @property
    def name(self) -> str:
        """How a reader is told which run this is."""
        machine = {"cpu": "CPU", "sm90": "GPU"}[self.machine]
        return f"{machine}, recorded" if self.recorded else f"this machine, {machine}"


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises SiteError naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SiteError(f"{path}: not readable as JSON ({error})") from error


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises SiteError naming it."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SiteError(f"{path}: not readable as YAML ({error})") from error


def take(mapping: Any, key: str, kind: type, where: str) -> Any:
    """`mapping[key]`, which must exist and be a `kind` (a bool is no int)."""
    if not isinstance(mapping, dict):
        raise SiteError(f"{where}: expected an object, got {type(mapping).__name__}")
    if key not in mapping:
        raise SiteError(f"{where}: {key!r} is missing")
    value = mapping[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SiteError(f"{where}: {key!r} must be {kind.__name__}, got {value!r}")
    return value


def strings(mapping: Any, where: str) -> dict[str, str]:
    """A JSON object of strings, checked."""
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise SiteError(f"{where}: expected an object of strings, got {mapping!r}")
    return dict(mapping)


def parse_date(text: str, where: str) -> datetime.datetime:
    """ISO date or date and time; one without a zone is UTC."""
    try:
        when = datetime.datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    except ValueError as error:
        raise SiteError(f"{where}: 'date' is not an ISO date: {text!r}") from error
    return when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)


def run_fields(data: Any, file: str, machine: str, *, recorded: bool) -> dict[str, Any]:
    """The arguments of `Run` that `file` holds. Raises SiteError naming it."""
    date = take(data, "date", str, file)
    return {
        "recorded": recorded,
        "file": file,
        "device": take(data, "device", str, file),
        "date": date,
        "when": parse_date(date, file),
        "commit": take(data, "commit", str, file),
        "versions": strings(take(data, "versions", dict, file), f"{file} versions"),
        "sources": strings(take(data, "sources", dict, file), f"{file} sources"),
        "machine": machine,
    }
