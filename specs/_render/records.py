"""Gate pages and recorded outcomes, read strictly: what a file fails to say is an error, never a guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specs._render.bench import Bench, parse_bench
from specs._render.reading import Run, SiteError, read_json, read_yaml, run_fields, strings, take

MACHINES = ("cpu", "sm90")
VERDICTS = ("pass", "fail", "not-run")
RELATIONS = ("<=", ">=", "==", None)


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
class Record(Run):
    """One run of one gate on one machine."""

    gate: int
    criteria: Mapping[str, Result]


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
    benches: tuple[Bench, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Everything that names generated sources."""
        return (*self.records, *self.benches)

    @property
    def bench(self) -> Bench | None:
        """The recorded benchmark run."""
        return next((run for run in self.benches if run.recorded), None)

    @property
    def local_bench(self) -> Bench | None:
        """The last benchmark run in this checkout."""
        return next((run for run in self.benches if not run.recorded), None)

    def gate(self, number: int) -> Gate:
        for gate in self.gates:
            if gate.number == number:
                return gate
        raise SiteError(f"gates.yml has no gate {number}")

    def find(self, gate: int, machine: str, *, recorded: bool) -> Record | None:
        wanted = (gate, machine, recorded)
        return next((r for r in self.records if (r.gate, r.machine, r.recorded) == wanted), None)


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


def parse_record(data: Any, file: str, *, recorded: bool) -> Record:
    """A record from its parsed JSON. Raises SiteError naming `file`."""
    gate, machine = take(data, "gate", int, file), take(data, "machine", str, file)
    if Path(file).name != f"gate{gate}.{machine}.json" or machine not in MACHINES:
        raise SiteError(f"{file}: says it is gate {gate} on {machine!r}, which is not what the file is called")
    fields = run_fields(data, file, machine, recorded=recorded)
    results = take(data, "criteria", dict, file)
    criteria = {name: parse_result(value, f"{file} criterion {name}") for name, value in results.items()}
    return Record(**fields, gate=gate, criteria=criteria)


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


def load_site(specs: Path, local: Path | None) -> Site:
    """Read specs/ and the ignored folder of local runs, which may be absent; None: leave it out."""
    records, benches = [], []
    for folder, recorded in ((specs / "results", True), (local, False)):
        if folder is None:
            continue
        for path in sorted(folder.glob("gate*.json")):
            records.append(parse_record(read_json(path), str(path), recorded=recorded))
        bench = folder / "bench.sm90.json"
        if bench.exists():
            benches.append(parse_bench(read_json(bench), str(bench), recorded=recorded))
    listing = local / "sources.json" if local else None
    sources = strings(read_json(listing), str(listing)) if listing and listing.exists() else None
    return Site(load_gates(specs), tuple(records), sources, tuple(benches))
