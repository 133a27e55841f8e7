"""The gate engine in small projects of its own: what it calls a pass, what it writes."""

from __future__ import annotations

import math
import textwrap

import pytest

from kernels import runtime
from tests import gate_engine
from tests import machine as machine_facts
from tests.house.conftest import Project, refused

pytest_plugins = ["pytester"]

USAGE_ERROR, OK, FAILED = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED

# What is a pass


@pytest.mark.parametrize(
    ("test", "verdict", "status"),
    [
        ("def test_second(): pass", "pass", OK),
        ("def test_second(): assert False", "fail", FAILED),
        ("def test_second(no_such_fixture): pass", "fail", FAILED),
        ("def test_second(broken_teardown): pass", "fail", FAILED),
        ("def test_second(skipping_teardown): assert False", "fail", FAILED),
        ("@pytest.mark.xfail(strict=True)\ndef test_second(): pass", "fail", FAILED),
        ("@pytest.mark.xfail\ndef test_second(): pass", "not-run", OK),
        ("@pytest.mark.xfail\ndef test_second(): assert False", "not-run", OK),
        ("@pytest.mark.skip\ndef test_second(): pass", "not-run", OK),
        ("def test_second(): pytest.skip()", "not-run", OK),
        ("@pytest.mark.sm90\ndef test_second(): pass", "not-run", OK),
        ("@pytest.mark.parametrize('x', [0, 1])\ndef test_second(x): assert not x", "fail", FAILED),
        ("@pytest.mark.parametrize('x', [])\ndef test_second(x): pass", "not-run", OK),
    ],
)
def test_verdicts(project: Project, test: str, verdict: str, status: int) -> None:
    """Beside a test that passes; a criterion of another test stays untouched."""
    fixtures = """
    @pytest.fixture
    def broken_teardown():
        yield
        assert False

    @pytest.fixture
    def skipping_teardown():
        yield
        pytest.skip()

    @proves("1.1", "1.2")
    def test_first(): pass

    """
    project.page("1.1", "1.2")
    project.tests(textwrap.dedent(fixtures) + f"@proves()\n{test}")
    result = project.run("--gate", "1")
    assert result.ret == status
    assert project.verdicts() == {"1.1": verdict, "1.2": "pass"}
    label = {"pass": "pass", "fail": "FAIL", "not-run": "not run here"}[verdict]
    result.stdout.fnmatch_lines([f"*1.1  {label} * tests  sentence of 1.1"])


@pytest.mark.parametrize(
    ("args", "criteria"),
    [
        (("-k", "not last"), {"1.1": "not-run", "1.2": "pass"}),
        (("--deselect", "checks/test_it.py::test_last"), {"1.1": "not-run", "1.2": "pass"}),
        (("-x",), {"1.1": "not-run", "1.2": "fail"}),
    ],
    ids=["k", "deselect", "x"],
)
def test_what_was_not_reached_is_not_a_pass(project: Project, args: tuple[str, ...], criteria: dict[str, str]) -> None:
    project.page("1.1", "1.2")
    failing = criteria["1.2"] == "fail"
    project.tests(
        f"""
        @proves()
        def test_first(): pass

        @proves("1.2")
        def test_second(): assert {not failing}

        @proves()
        def test_last(): pass
        """
    )
    project.run("--gate", "1", *args)
    assert project.verdicts() == criteria


def test_evidence_that_no_record_could_hold_fails_its_test() -> None:
    evidence = gate_engine.Evidence()
    with pytest.raises(TypeError, match="'what' is a object, must fit JSON"):
        evidence.note("what", object())
    assert evidence.items == []


@pytest.mark.parametrize("broken", ["import no_such_module", "def test_x(): pytest.exit('stop')"])
def test_a_session_cut_short_leaves_no_outcome(project: Project, broken: str) -> None:
    project.tests(broken if "import" in broken else f"@proves()\n{broken}", "test_another")
    result = project.run("--gate", "1", "--record")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not (project.root / ".gates").exists() and not (project.root / "specs" / "results").exists()


def test_a_broken_module_is_not_a_missing_test(project: Project) -> None:
    project.tests("import no_such_module\n\n@proves()\ndef test_it(): pass")
    for args in ((), ("--gate", "1")):
        result = project.run(*args)
        assert result.ret == pytest.ExitCode.INTERRUPTED
        result.stdout.fnmatch_lines(["*ModuleNotFoundError: No module named 'no_such_module'"])


def test_only_the_tests_of_the_gate_run(project: Project) -> None:
    project.page("2.1", gate=2)
    project.tests(
        """
        def test_no_criterion(): assert False

        @proves("2.1")
        def test_of_another_gate(): assert False

        @proves("1.1", "2.1")
        class TestBoth:
            def test_one(self): pass
            def test_two(self): pass
        """
    )
    result = project.run("--gate", "1")
    result.assert_outcomes(passed=2, deselected=2)
    assert project.record()["criteria"] == {"1.1": {"verdict": "pass", "tests": 2, "evidence": []}}


def test_a_hopper_gpu_runs_what_needs_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "kind", lambda: "sm90")
    monkeypatch.setattr(machine_facts, "device_name", lambda: "some GPU")
    project.tests("@proves()\n@pytest.mark.sm90\ndef test_it(): pass")
    project.run("--gate", "1")
    record = project.record(machine="sm90")
    assert (record["device"], record["criteria"]["1.1"]["verdict"]) == ("some GPU", "pass")


# What is written


def test_only_a_record_is_written_to_specs(project: Project) -> None:
    results = project.root / "specs" / "results"
    assert project.run().ret == OK
    assert not (project.root / ".gates").exists()
    assert project.run("--gate", "1", "--commit", "abc").ret == OK
    assert project.record()["commit"] == "abc"
    assert not results.exists()
    assert project.run("--gate", "1", "--record").ret == OK
    assert [path.name for path in results.iterdir()] == ["gate1.cpu.json"]
    record = project.record("specs/results")
    assert record == project.record()
    assert record["gate"] == 1 and record["machine"] == "cpu"
    assert set(record) == {"gate", "machine", "device", "date", "commit", "versions", "sources", "criteria"}


def test_the_worst_evidence_of_all_cases(project: Project) -> None:
    project.tests(
        """
        @proves()
        @pytest.mark.parametrize("x", [0.25, 0.75, 0.5])
        def test_it(x, evidence):
            evidence.at_most("error", x, 1.0, "ulp")
            evidence.at_least("accuracy", x, 0.0)
            evidence.equal("differences", 0, 0)
            evidence.note("registers", 40)
        """
    )
    result = project.run("--gate", "1")
    assert project.record()["criteria"]["1.1"]["evidence"] == [
        {"name": "error", "value": 0.75, "limit": 1.0, "unit": "ulp", "relation": "<=", "cases": 3},
        {"name": "accuracy", "value": 0.25, "limit": 0.0, "unit": "", "relation": ">=", "cases": 3},
        {"name": "differences", "value": 0, "limit": 0, "unit": "", "relation": "==", "cases": 3},
        {"name": "registers", "value": 40, "limit": None, "unit": "", "relation": None, "cases": 3},
    ]
    result.stdout.fnmatch_lines(["*error: 0.75 ulp  (<= 1.0)  ?3 cases?"])


def test_failed_evidence_is_kept(project: Project) -> None:
    project.tests(
        """
        @proves()
        @pytest.mark.parametrize("x", [0.5, float("nan"), 0.75])
        def test_it(x, evidence): evidence.at_most("error", x, 1.0)
        """
    )
    assert project.run("--gate", "1").ret == FAILED
    (item,) = project.record()["criteria"]["1.1"]["evidence"]
    assert math.isnan(item["value"]) and item["cases"] == 3


@pytest.mark.parametrize(
    ("relation", "good", "bad"),
    [
        ("<=", (1.0, 2.0), (2.0, 1.0)),
        ("<=", (0.0, 0.0), (math.nan, 0.0)),
        (">=", (2.0, 1.0), (1.0, 2.0)),
        (">=", (2.0, 1.0), (math.nan, 1.0)),
        ("==", (3, 3), (4, 3)),
        ("==", (0.0, 0.0), (math.nan, 0.0)),
    ],
)
def test_a_check_holds_or_fails(relation: str, good: tuple[float, float], bad: tuple[float, float]) -> None:
    method = {"<=": "at_most", ">=": "at_least", "==": "equal"}[relation]
    evidence = gate_engine.Evidence()
    getattr(evidence, method)("x", *good)
    with pytest.raises(AssertionError, match=f"x = {bad[0]}, required {relation} {bad[1]}"):
        getattr(evidence, method)("x", *bad)
    assert [item["value"] for item in evidence.items[:1]] == [good[0]]
    assert len(evidence.items) == 2


@pytest.mark.parametrize(
    ("relation", "bad", "fine"),
    [
        ("<=", (0.5, 1.0), (0.25, 1.0)),
        ("<=", (2e-20, 1.0), (1e-20, 1.0)),  # both shares of the limit round to 1
        ("<=", (0.5, 1.0), (5.0, 100.0)),  # closer to its own limit
        ("<=", (math.nan, 1.0), (2.0, 1.0)),
        ("<=", (math.nan, 1.0), (0.5, 2.0)),
        ("<=", (math.inf, 1.0), (0.5, 2.0)),
        (">=", (0.5, 0.25), (0.75, 0.25)),
        (">=", (math.nan, 0.25), (0.75, 0.5)),
        ("==", (2, 1), (1, 1)),
        ("==", (2, 1), (7, 7)),
    ],
)
def test_the_worse_of_two(relation: str, bad: tuple[float, float], fine: tuple[float, float]) -> None:
    first, second = ({"value": value, "limit": limit, "relation": relation} for value, limit in (bad, fine))
    assert gate_engine.worse(first, second) is first
    assert gate_engine.worse(second, first) is first
    note = {"value": 3, "limit": None, "relation": None}
    assert gate_engine.worse(note, first) is first and gate_engine.worse(first, note) is first


# With pytest-xdist, as the nox sessions run it


def test_workers_give_the_same_record(project: Project) -> None:
    project.page("1.1", "1.2", "1.3", "1.4")
    project.tests(
        """
        from kernels import runtime

        @proves()
        @pytest.mark.parametrize("x", range(5))
        def test_pass(x, evidence):
            evidence.at_most("error", x, 9)
            runtime.SOURCES[f"program(x={x})"] = f"hash {x}"

        @proves("1.2")
        @pytest.mark.parametrize("x", range(3))
        def test_fail(x): assert x

        @proves("1.3")
        @pytest.mark.parametrize("x", range(3))
        def test_skip(x): x or pytest.skip()

        @proves("1.4")
        @pytest.mark.parametrize("x", range(3))
        def test_deselected(x): pass
        """
    )
    args = ("--gate", "1", "--deselect", "checks/test_it.py::test_deselected[1]")
    assert project.run(*args).ret == FAILED
    alone = project.record()
    assert project.verdicts() == {"1.1": "pass", "1.2": "fail", "1.3": "not-run", "1.4": "not-run"}
    assert alone["sources"] == {f"program(x={x})": f"hash {x}" for x in range(5)}
    runtime.SOURCES.clear()
    (project.root / ".gates" / "gate1.cpu.json").unlink()
    assert project.run(*args, "-p", "xdist", "-n", "2").ret == FAILED
    assert {**project.record(), "date": ""} == {**alone, "date": ""}


def test_workers_report_what_is_untraceable(project: Project) -> None:
    project.page("1.1", "1.2")
    assert refused(project.run("--gate", "1", "-p", "xdist", "-n", "1"), "criteria without a test: 1.2")
    assert not (project.root / ".gates").exists()


def test_a_worker_writes_nothing(project: Project) -> None:
    """It has seen a part of the tests; its controller may yet be interrupted."""
    project.write("conftest.py", "def pytest_configure(config): config.workerinput, config.workeroutput = {}, {}\n")
    assert project.run("--gate", "1", "--record").ret == OK
    assert not (project.root / ".gates").exists() and not (project.root / "specs" / "results").exists()
