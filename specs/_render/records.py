"""Gate pages and recorded outcomes, read strictly: what a file fails to say is an error, never a guess."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MACHINES = ("cpu", "sm90")
VERDICTS = ("pass", "fail", "not-run")
RELATIONS = ("<=", ">=", "==", None)


class SiteError(ValueError):
    """An input of the site is missing, malformed or contradicts itself. The message names the file."""


@dataclass(frozen=True)
class Evidence:
    """One measured value of a criterion; over several cases, the worst one."""

    name: str
    value: Any
    limit: Any
    unit: str
    relation: str | None  # None: a note, nothing was asserted
    cases: int

    @property
    def holds(self) -> bool:
        """True if the value satisfies its own relation (a NaN never does)."""
        if self.relation == "==":
            return bool(self.value == self.limit)
        if self.relation == "<=":
            return bool(self.value <= self.limit)
        return self.relation is None or bool(self.value >= self.limit)


@dataclass(frozen=True)
class Result:
    """What a record says about one criterion."""

    verdict: str
    tests: int
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Record:
    """One run of one gate on one machine."""

    gate: int
    machine: str
    recorded: bool  # True: in specs/results; False: the last run in this checkout (.gates)
    file: str
    device: str
    date: str
    when: datetime.datetime
    commit: str
    versions: Mapping[str, str]
    sources: Mapping[str, str]  # program label -> sha256 of its generated CUDA
    criteria: Mapping[str, Result]

    @property
    def name(self) -> str:
        """How a reader is told which run this is."""
        machine = {"cpu": "CPU", "sm90": "GPU"}[self.machine]
        return f"{machine}, recorded" if self.recorded else f"this machine, {machine}"


@dataclass(frozen=True)
class Gate:
    """One gate: a row of gates.yml and, once written, its page."""

    number: int
    session: str
    proves: str
    page: str | None  # relative to specs/; None: planned
    criteria: Mapping[str, str]


@dataclass(frozen=True)
class Site:
    """Everything that the pages are rendered from."""

    gates: tuple[Gate, ...]
    records: tuple[Record, ...]
    sources: Mapping[str, str] | None  # what this checkout generates; None: nobody asked

    def gate(self, number: int) -> Gate:
        for gate in self.gates:
            if gate.number == number:
                return gate
        raise SiteError(f"gates.yml has no gate {number}")

    def find(self, gate: int, machine: str, *, recorded: bool) -> Record | None:
        wanted = (gate, machine, recorded)
        return next((r for r in self.records if (r.gate, r.machine, r.recorded) == wanted), None)


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


def parse_evidence(data: Any, where: str) -> Evidence:
    name = take(data, "name", str, where)
    where = f"{where} evidence {name!r}"
    relation = data.get("relation")
    relation = None if relation == "null" else relation
    if relation not in RELATIONS:
        raise SiteError(f"{where}: unknown relation {relation!r}")
    if "value" not in data:
        raise SiteError(f"{where}: 'value' is missing")
    if relation in ("<=", ">=") and not all(isinstance(x, (int, float)) for x in (data["value"], data.get("limit"))):
        raise SiteError(f"{where}: {relation} needs a number and a numeric limit")
    return Evidence(
        name,
        data["value"],
        data.get("limit"),
        data.get("unit") or "",
        relation,
        take(data, "cases", int, where),
    )


def parse_result(data: Any, where: str) -> Result:
    """One criterion of a record. A pass that its evidence contradicts, or that no test made, is an error."""
    verdict = take(data, "verdict", str, where)
    if verdict not in VERDICTS:
        raise SiteError(f"{where}: unknown verdict {verdict!r}, expected one of {', '.join(VERDICTS)}")
    evidence = tuple(parse_evidence(item, where) for item in take(data, "evidence", list, where))
    result = Result(verdict, take(data, "tests", int, where), evidence)
    if verdict == "pass":
        if result.tests < 1:
            raise SiteError(f"{where}: a pass that no test made")
        for item in evidence:
            if not item.holds:
                said = f"{item.name} = {item.value!r} is not {item.relation} {item.limit!r}"
                raise SiteError(f"{where}: says pass, but {said}")
    return result


def parse_date(text: str, where: str) -> datetime.datetime:
    """ISO date or date and time; one without a zone is UTC."""
    try:
        when = datetime.datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    except ValueError as error:
        raise SiteError(f"{where}: 'date' is not an ISO date: {text!r}") from error
    return when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)


def parse_record(data: Any, file: str, *, recorded: bool) -> Record:
    """A record from its parsed JSON. Raises SiteError naming `file`."""
    gate, machine = take(data, "gate", int, file), take(data, "machine", str, file)
    if Path(file).name != f"gate{gate}.{machine}.json" or machine not in MACHINES:
        raise SiteError(f"{file}: says it is gate {gate} on {machine!r}, which is not what the file is called")
    date = take(data, "date", str, file)
    results = take(data, "criteria", dict, file)
    return Record(
        gate=gate,
        machine=machine,
        recorded=recorded,
        file=file,
        device=take(data, "device", str, file),
        date=date,
        when=parse_date(date, file),
        commit=take(data, "commit", str, file),
        versions=strings(take(data, "versions", dict, file), f"{file} versions"),
        sources=strings(take(data, "sources", dict, file), f"{file} sources"),
        criteria={name: parse_result(value, f"{file} criterion {name}") for name, value in results.items()},
    )


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML between the two `---` lines at the top of a page."""
    match = re.match(r"---\n(.*?)\n---\n", path.read_text(encoding="utf-8"), re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        raise SiteError(f"{path}: front matter is not readable as YAML ({error})") from error
    if not isinstance(data, dict):
        raise SiteError(f"{path}: no front matter")
    return data


def load_gates(specs: Path) -> tuple[Gate, ...]:
    """Every gate of gates.yml; those with a page gates/gate<N>.md bring its criteria."""
    table = read_yaml(specs / "gates.yml")
    gates = []
    for number in sorted(table):
        page = specs / "gates" / f"gate{number}.md"
        session, proves = (take(table[number], key, str, f"gates.yml gate {number}") for key in ("session", "proves"))
        if not page.exists():
            gates.append(Gate(number, session, proves, None, {}))
            continue
        meta = front_matter(page)
        if take(meta, "gate", int, str(page)) != number:
            raise SiteError(f"{page}: front matter says gate {meta['gate']}")
        criteria = strings(take(meta, "criteria", dict, str(page)), f"{page} criteria")
        if not all(isinstance(key, str) for key in criteria):
            raise SiteError(f'{page}: quote the criteria\'s numbers ("{number}.1": ...)')
        session = take(meta, "session", str, str(page))
        gates.append(Gate(number, session, proves, f"gates/gate{number}.md", criteria))
    return tuple(gates)


def load_site(specs: Path, local: Path) -> Site:
    """Read specs/ and the ignored folder of local runs (which may be absent)."""
    records = []
    for folder, recorded in ((specs / "results", True), (local, False)):
        for path in sorted(folder.glob("gate*.json")):
            records.append(parse_record(read_json(path), str(path), recorded=recorded))
    listing = local / "sources.json"
    sources = strings(read_json(listing), str(listing)) if listing.exists() else None
    return Site(load_gates(specs), tuple(records), sources)
