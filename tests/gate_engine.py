"""pytest as the gate engine: criteria on spec pages, tests that prove them, one recorded outcome per gate and machine.

A spec page ``specs/gates/gate<N>.md`` lists numbered criteria in its front matter; a test says
``@pytest.mark.criterion("3.4")``. ``pytest --gate 3`` runs the tests of one gate, prints a table and writes
``.gates/gate3.<machine>.json``; ``--record`` writes ``specs/results/`` too. Collection fails when a criterion has no
test or a test names no criterion. A criterion passes only if every one of its tests ran and passed; if any was skipped,
deselected or never reached, the verdict is "not-run".
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kernels import runtime
from tests import machine as machine_facts
from tests.criteria import gate_of, load_criteria, sort_key

#: a session that ended in any other way was cut short and proves nothing
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
RELATIONS = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "==": lambda value, limit: value == limit,
}


class Evidence:
    """What a test measured. `at_most`, `at_least` and `equal` assert and record; `note` only records."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def _keep(self, name: str, value: Any, relation: str | None, limit: Any, unit: str) -> None:
        for x in (value, limit):
            try:
                json.dumps(x)
            except TypeError as error:  # here, in the test: workers and records would fail far from it
                raise TypeError(f"evidence {name!r} is a {type(x).__name__}, must fit JSON; give it as text") from error
        self.items.append({"name": name, "value": value, "limit": limit, "unit": unit, "relation": relation})

    def _check(self, name: str, value: Any, relation: str, limit: Any, unit: str) -> None:
        self._keep(name, value, relation, limit, unit)
        assert RELATIONS[relation](value, limit), f"{name} = {value}{unit and f' {unit}'}, required {relation} {limit}"

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._check(name, value, "<=", limit, unit)

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._check(name, value, ">=", limit, unit)

    def equal(self, name: str, value: Any, expected: Any, unit: str = "") -> None:
        self._check(name, value, "==", expected, unit)

    def note(self, name: str, value: Any, unit: str = "") -> None:
        self._keep(name, value, None, None, unit)


def worse(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Of two evidence items of one name, the one to show: a failed one, else the closest to its limit.

    Of two notes the larger number.
    """
    return new if _margin(new) < _margin(old) else old


def _margin(item: dict[str, Any]) -> tuple[float, float]:
    """Sorts worse items first: by distance to the limit as a share of the limit, then by value."""
    relation, value, limit = item["relation"], item["value"], item["limit"]
    if relation is None:
        return float("inf"), -value if isinstance(value, (int, float)) else 0.0
    if relation == "==":
        return (0.0 if value == limit else float("-inf")), 0.0
    if value != value:  # NaN
        return float("-inf"), 0.0
    sign = 1.0 if relation == "<=" else -1.0
    return sign * (limit - value) / (abs(limit) or 1.0), -sign * value


class GateRun:
    """Collects reports into criteria; one instance per pytest controller."""

    def __init__(self, config: pytest.Config, criteria: dict[str, str]) -> None:
        self.config = config
        self.criteria = criteria
        self.gate: int | None = config.getoption("--gate")
        self.outcomes: dict[str, dict[str, str]] = {}  # criterion -> node id -> outcome
        self.evidence: dict[str, dict[str, dict[str, Any]]] = {}  # criterion -> name -> item
        self.expected: dict[str, list[str]] = {}  # criterion -> node ids of its tests, run or not
        self.sources: dict[str, str] = {}
        self.problem = ""

    def untraceable(self, items: list[pytest.Item]) -> str:
        """What is wrong between criteria and tests, or ""."""
        claimed = {id_ for item in items for id_ in criteria_of(item)}
        unknown = sorted(str(id_) for id_ in claimed if id_ not in self.criteria)
        if unknown:
            return f"tests name criteria that no gate page lists: {', '.join(unknown)}"
        wanted = {id_ for id_ in self.criteria if self.gate is None or gate_of(id_) == self.gate}
        untested = sorted(wanted - claimed, key=sort_key)
        if untested and covers_suite(self.config):
            return f"criteria without a test: {', '.join(untested)}"
        return ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if session.testsfailed:  # a module that cannot be imported: pytest reports that, and runs nothing
            return
        self.problem = self.untraceable(items)
        if self.problem and not is_worker(config):
            raise pytest.UsageError(self.problem)
        chosen = [
            item for item in items if self.gate is None or any(gate_of(i) == self.gate for i in criteria_of(item))
        ]
        for item in chosen:
            item.user_properties.append(("criteria", criteria_of(item)))
            for id_ in criteria_of(item):
                self.expected.setdefault(id_, []).append(item.nodeid)
        if self.problem:  # the controller raises it when it hears of it; until then this worker runs nothing
            chosen = []
        if len(chosen) < len(items):
            kept = set(chosen)
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        for id_ in properties.get("criteria", ()):
            seen = self.outcomes.setdefault(id_, {})
            if seen.get(report.nodeid) != "failed" and (report.when == "call" or report.outcome != "passed"):
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
        seen = self.outcomes.get(criterion, {})
        if "failed" in seen.values():
            return "fail"
        expected = self.expected.get(criterion, [])
        return "pass" if expected and all(seen.get(test) == "passed" for test in expected) else "not-run"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist found; the controller itself collects nothing."""
        output = getattr(node, "workeroutput", {})
        self.sources.update(output.get("gate_sources", {}))
        self.expected.update(output.get("gate_expected", {}))
        if output.get("gate_problem"):
            raise pytest.UsageError(output["gate_problem"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.sources.update(runtime.SOURCES)
        if is_worker(self.config):
            found = {"gate_sources": self.sources, "gate_expected": self.expected, "gate_problem": self.problem}
            self.config.workeroutput.update(found)  # type: ignore[attr-defined]
        elif self.gate is not None and exitstatus in COMPLETE and not self.config.option.collectonly:
            self.write(self.record())

    def record(self) -> dict[str, Any]:
        ids = sorted((id_ for id_ in self.criteria if gate_of(id_) == self.gate), key=sort_key)
        return {
            "gate": self.gate,
            "machine": machine_facts.kind(),
            "device": machine_facts.device_name(),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": self.config.getoption("--commit") or machine_facts.commit(self.config.rootpath),
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
        root = self.config.rootpath
        folders = [root / ".gates"] + ([root / "specs" / "results"] if self.config.getoption("--record") else [])
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"gate{record['gate']}.{record['machine']}.json"
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.gate is None:
            return
        out = terminalreporter
        out.write_sep("=", f"gate {self.gate} on {machine_facts.kind()} ({machine_facts.device_name()})")
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


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def covers_suite(config: pytest.Config) -> bool:
    """Whether this run collects every test: no path, or paths that hold the whole suite, and nothing left out."""
    if any(config.getoption(name, None) for name in ("ignore", "ignore_glob", "lf", "sample")):
        return False
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        return True
    given = [(config.invocation_params.dir / path).resolve() for path in config.args]
    suite = [(config.rootpath / path).resolve() for path in config.getini("testpaths")]
    return all(any(folder.is_relative_to(path) for path in given) for folder in suite)


def criteria_of(item: pytest.Item) -> list[str]:
    return [id_ for mark in item.iter_markers("criterion") for id_ in mark.args]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gates")
    group.addoption("--gate", type=int, default=None, metavar="N", help="run the tests of gate N and write its outcome")
    group.addoption("--record", action="store_true", help="also write the outcome to specs/results/")
    group.addoption("--commit", default=None, help="commit to name in the outcome where there is no git checkout")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "criterion(id, ...): the criteria of specs/gates/ that this test proves")
    config.addinivalue_line("markers", "sm90: needs a Hopper GPU; elsewhere it is reported as not run")
    gate, criteria = config.getoption("--gate"), load_criteria(config.rootpath / "specs" / "gates")
    if config.getoption("--record") and gate is None and not config.getoption("--speed", False):
        raise pytest.UsageError("--record needs --gate N: one record holds one gate")
    if gate is not None and not any(gate_of(id_) == gate for id_ in criteria):
        raise pytest.UsageError(f"--gate {gate}: specs/gates/ lists no criterion of this gate")
    if gate is not None and not covers_suite(config):
        raise pytest.UsageError(
            f"--gate {gate} runs every test of the gate: give it no path, --ignore, --lf or --sample"
        )
    config.pluginmanager.register(GateRun(config, criteria), "gate-run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sm90") and machine_facts.kind() != "sm90":
        pytest.skip("needs a Hopper GPU: not run here")


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Iterator[Evidence]:
    """Records what the test measured under the test's criteria."""
    collected = Evidence()
    yield collected
    request.node.user_properties.append(("evidence", collected.items))
