"""pytest as the gate engine: criteria on spec pages, tests that prove them, one recorded outcome per gate and machine.

A spec page ``specs/gates/gate<N>.md`` lists numbered criteria in its front matter; a test says
``@pytest.mark.criterion("3.4")``. ``pytest --gate 3`` runs the tests of one gate, prints a table and writes
``.gates/gate3.<machine>.json``; ``--record`` writes ``specs/results/`` too. Collection fails when a criterion has no
test or a test names no criterion. A criterion passes only if every one of its tests ran and passed; if any was
skipped the verdict is "not-run".
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels import runtime
from tests import machine as machine_facts

ROOT = Path(__file__).resolve().parent.parent
GATE_RUN = pytest.StashKey["GateRun"]()
RELATIONS = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "==": lambda value, limit: value == limit,
}


def load_criteria(pages: Path) -> dict[str, str]:
    """Criterion id -> its sentence, over all gate pages. Raises UsageError on a malformed or duplicate id."""
    criteria: dict[str, str] = {}
    for page in sorted(pages.glob("gate*.md")):
        front = yaml.safe_load(page.read_text().split("---", 2)[1])
        for key, text in front["criteria"].items():
            if not isinstance(key, str) or key.split(".")[0] != str(front["gate"]):
                raise pytest.UsageError(f"{page.name}: criterion {key!r} is not a string '{front['gate']}.<n>'")
            if key in criteria:
                raise pytest.UsageError(f"{page.name}: criterion {key} is listed twice")
            criteria[key] = text
    return criteria


class Evidence:
    """What a test measured. `at_most`, `at_least` and `equal` assert and record; `note` only records."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def _check(self, name: str, value: Any, relation: str, limit: Any, unit: str) -> None:
        self.items.append({"name": name, "value": value, "limit": limit, "unit": unit, "relation": relation})
        assert RELATIONS[relation](value, limit), f"{name} = {value}{unit and f' {unit}'}, required {relation} {limit}"

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._check(name, value, "<=", limit, unit)

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._check(name, value, ">=", limit, unit)

    def equal(self, name: str, value: Any, expected: Any, unit: str = "") -> None:
        self._check(name, value, "==", expected, unit)

    def note(self, name: str, value: Any, unit: str = "") -> None:
        self.items.append({"name": name, "value": value, "limit": None, "unit": unit, "relation": None})


def worse(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Of two evidence items of one name, the one to show: a failed one, else the closest to its limit."""
    relation, limit = new["relation"], new["limit"]
    if relation is None or limit != old["limit"]:
        return old if relation is None else min(old, new, key=lambda item: _margin(item))
    if relation == "==":
        return new if old["value"] == limit else old
    if new["value"] != new["value"]:  # NaN
        return new
    worst = max if relation == "<=" else min
    return worst(old, new, key=lambda item: item["value"])


def _margin(item: dict[str, Any]) -> float:
    """Distance to the limit as a share of the limit; smaller is worse."""
    if item["relation"] == "==":
        return 0.0 if item["value"] == item["limit"] else -1.0
    sign = 1.0 if item["relation"] == "<=" else -1.0
    return sign * (item["limit"] - item["value"]) / (abs(item["limit"]) or 1.0)


class GateRun:
    """Collects reports into criteria; one instance per pytest controller."""

    def __init__(self, config: pytest.Config, criteria: dict[str, str]) -> None:
        self.config = config
        self.criteria = criteria
        self.gate: int | None = config.getoption("--gate")
        self.outcomes: dict[str, dict[str, str]] = {}  # criterion -> node id -> outcome
        self.evidence: dict[str, dict[str, dict[str, Any]]] = {}  # criterion -> name -> item
        self.sources: dict[str, str] = {}

    def check_traceability(self, items: list[pytest.Item]) -> None:
        claimed = {id_ for item in items for id_ in criteria_of(item)}
        unknown = sorted(claimed - set(self.criteria))
        if unknown:
            raise pytest.UsageError(f"tests name criteria that no gate page lists: {', '.join(unknown)}")
        whole = self.gate is not None or self.config.args_source == pytest.Config.ArgsSource.TESTPATHS
        wanted = {id_ for id_ in self.criteria if self.gate is None or gate_of(id_) == self.gate}
        untested = sorted(wanted - claimed, key=sort_key)
        if whole and untested:
            raise pytest.UsageError(f"criteria without a test: {', '.join(untested)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.check_traceability(items)
        if self.gate is None:
            return
        chosen = [item for item in items if any(gate_of(id_) == self.gate for id_ in criteria_of(item))]
        rest = [item for item in items if item not in set(chosen)]
        config.hook.pytest_deselected(items=rest)
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        for id_ in properties.get("criteria", ()):
            seen = self.outcomes.setdefault(id_, {})
            if report.when == "call" or report.outcome != "passed":
                seen[report.nodeid] = "skipped" if hasattr(report, "wasxfail") else report.outcome
            if report.when == "teardown":
                for item in properties.get("evidence", ()):
                    self.add_evidence(id_, item)

    def add_evidence(self, criterion: str, item: dict[str, Any]) -> None:
        names = self.evidence.setdefault(criterion, {})
        old = names.get(item["name"])
        if old is None:
            names[item["name"]] = {**item, "cases": 1}
        else:
            names[item["name"]] = {**worse(old, item), "cases": old["cases"] + 1}

    def verdict(self, criterion: str) -> str:
        outcomes = set(self.outcomes.get(criterion, {}).values())
        if "failed" in outcomes:
            return "fail"
        return "pass" if outcomes == {"passed"} else "not-run"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.sources.update(getattr(node, "workeroutput", {}).get("gate_sources", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.gate is None or session.config.option.collectonly:
            return
        self.sources.update(runtime.SOURCES)
        self.write(self.record())

    def record(self) -> dict[str, Any]:
        ids = sorted((id_ for id_ in self.criteria if gate_of(id_) == self.gate), key=sort_key)
        return {
            "gate": self.gate,
            "machine": machine_facts.kind(),
            "device": machine_facts.device_name(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": self.config.getoption("--commit") or machine_facts.commit(ROOT),
            "versions": machine_facts.versions(),
            "sources": dict(sorted(self.sources.items())),
            "criteria": {
                id_: {
                    "verdict": self.verdict(id_),
                    "tests": len(self.outcomes.get(id_, {})),
                    "evidence": list(self.evidence.get(id_, {}).values()),
                }
                for id_ in ids
            },
        }

    def write(self, record: dict[str, Any]) -> None:
        folders = [ROOT / ".gates"] + ([ROOT / "specs" / "results"] if self.config.getoption("--record") else [])
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"gate{record['gate']}.{record['machine']}.json"
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.gate is None:
            return
        out = terminalreporter
        out.section(f"gate {self.gate} on {machine_facts.kind()} ({machine_facts.device_name()})")
        for id_, text in self.criteria.items():
            if gate_of(id_) != self.gate:
                continue
            verdict = self.verdict(id_)
            style = {"pass": {"green": True}, "fail": {"red": True, "bold": True}}.get(verdict, {"yellow": True})
            label = {"pass": "pass", "fail": "FAIL", "not-run": "not run here"}[verdict]
            out.write(f"  {id_:>5}  ")
            out.write(f"{label:<13}", **style)
            out.write_line(f"{len(self.outcomes.get(id_, {})):>4} tests  {text}")
            for item in self.evidence.get(id_, {}).values():
                out.write_line(f"{'':24}{describe(item)}")


def describe(item: dict[str, Any]) -> str:
    value = f"{item['value']:.4g}" if isinstance(item["value"], float) else str(item["value"])
    limit = "" if item["relation"] is None else f"  ({item['relation']} {item['limit']})"
    return f"{item['name']}: {value} {item['unit']}".rstrip() + limit + f"  [{item['cases']} cases]"


def criteria_of(item: pytest.Item) -> list[str]:
    return [id_ for mark in item.iter_markers("criterion") for id_ in mark.args]


def gate_of(criterion: str) -> int:
    return int(criterion.split(".")[0])


def sort_key(criterion: str) -> tuple[int, ...]:
    return tuple(int(part) for part in criterion.split("."))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gates")
    group.addoption("--gate", type=int, default=None, metavar="N", help="run the tests of gate N and write its outcome")
    group.addoption("--record", action="store_true", help="also write the outcome to specs/results/")
    group.addoption("--commit", default=None, help="commit to name in the outcome where there is no git checkout")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "criterion(id, ...): the criteria of specs/gates/ that this test proves")
    config.addinivalue_line("markers", "sm90: needs a Hopper GPU; elsewhere it is reported as not run")
    if config.getoption("--record") and config.getoption("--gate") is None:
        raise pytest.UsageError("--record needs --gate N: one record holds one gate")
    run = GateRun(config, load_criteria(ROOT / "specs" / "gates"))
    config.stash[GATE_RUN] = run
    config.pluginmanager.register(run, "gate-run")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gate_sources"] = dict(runtime.SOURCES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties.append(("criteria", criteria_of(item)))
    if item.get_closest_marker("sm90") and machine_facts.kind() != "sm90":
        pytest.skip("needs a Hopper GPU: not run here")


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[Evidence]:
    """Records what the test measured under the test's criteria."""
    collected = Evidence()
    yield collected
    request.node.user_properties.append(("evidence", collected.items))
