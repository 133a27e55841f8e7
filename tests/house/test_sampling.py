"""What `--sample` leaves out, and that it does not when it must not."""

from __future__ import annotations

import pytest

from tests import machine as machine_facts
from tests import sampling
from tests.house.conftest import Project, refused

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "tests.sampling")
CASES = """
@pytest.mark.costly
@proves("1.1")
@pytest.mark.parametrize("x", range(20))
def test_costly(x): pass

@proves("1.1")
@pytest.mark.parametrize("x", range(5))
def test_cheap(x): pass
"""


@pytest.fixture
def project_with_cases(project: Project) -> Project:
    project.page("1.1")
    project.tests(CASES)
    return project


def test_a_sample_has_few_costly_cases_and_all_others(project_with_cases: Project) -> None:
    sampled = project_with_cases.run(*PLUGIN, "--sample")
    sampled.assert_outcomes(passed=sampling.CASES + 5, deselected=20 - sampling.CASES)
    project_with_cases.run(*PLUGIN).assert_outcomes(passed=25)


def test_the_commit_chooses(project_with_cases: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are not committed do not."""
    drawn = {}
    for commit in ("a", "a-dirty", "b", "c"):
        monkeypatch.setattr(machine_facts, "commit", lambda root, commit=commit: commit)
        lines = project_with_cases.run(*PLUGIN, "--sample", "-v", "-k", "costly").outlines
        drawn[commit] = {line.split()[0] for line in lines if "PASSED" in line}
    assert all(len(cases) == sampling.CASES for cases in drawn.values())
    assert drawn["a"] == drawn["a-dirty"]
    assert len({frozenset(cases) for cases in drawn.values()}) > 1


def test_seeds_draw_different_cases_and_reach_all() -> None:
    nodes = [f"a.py::test[{i}]" for i in range(20)]
    drawn = [sampling.sample(nodes, str(seed)) for seed in range(200)]
    assert all(len(set(cases)) == sampling.CASES for cases in drawn)
    assert drawn[0] == sampling.sample(nodes[::-1], "0")
    assert {case for cases in drawn for case in cases} == set(nodes)


def test_a_gate_takes_no_sample(project_with_cases: Project) -> None:
    refusal = "--gate 1 runs every test of the gate: give it no path, --ignore, --lf or --sample"
    assert refused(project_with_cases.run(*PLUGIN, "--sample", "--gate", "1"), refusal)
    assert project_with_cases.run(*PLUGIN, "--gate", "1").ret == pytest.ExitCode.OK
