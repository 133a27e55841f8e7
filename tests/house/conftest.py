"""A small project of its own for the tests of the gate engine."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kernels import runtime
from tests import machine as machine_facts


class Project:
    """A project with one gate: its page lists `criteria`, its tests are in checks/."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.root: Path = pytester.path
        options = "-p tests.gate_engine --strict-markers --import-mode=importlib"
        pytester.makeini(f"[pytest]\ntestpaths = checks\naddopts = {options}\n")

    def page(self, *criteria: str, gate: int = 1) -> None:
        lines = "".join(f'  "{id_}": sentence of {id_}\n' for id_ in criteria)
        self.write(f"specs/gates/gate{gate}.md", f"---\ngate: {gate}\ncriteria:\n{lines}---\n\n# Gate {gate}\n")

    def tests(self, body: str, name: str = "test_it") -> None:
        head = 'import pytest\n\nproves = lambda *ids: pytest.mark.criterion(*(ids or ("1.1",)))\n\n'
        self.write(f"checks/{name}.py", head + textwrap.dedent(body))

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def run(self, *args: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(*args)

    def record(self, folder: str = ".gates", machine: str = "cpu") -> dict[str, Any]:
        return json.loads((self.root / folder / f"gate1.{machine}.json").read_text())

    def verdicts(self) -> dict[str, str]:
        return {id_: found["verdict"] for id_, found in self.record()["criteria"].items()}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take seconds to load
    monkeypatch.setattr(machine_facts, "kind", lambda: "cpu")
    monkeypatch.setattr(machine_facts, "versions", lambda: {"torch": "0"})
    monkeypatch.setattr(runtime, "SOURCES", {})
    made = Project(pytester)
    made.page("1.1")
    made.tests("@proves()\ndef test_it(): pass")
    return made


def refused(result: pytest.RunResult, text: str) -> bool:
    return result.ret == pytest.ExitCode.USAGE_ERROR and text in result.stderr.str()
