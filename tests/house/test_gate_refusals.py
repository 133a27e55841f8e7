"""What the gate engine refuses, in small projects of its own."""

from __future__ import annotations

import pytest

from tests.house.conftest import Project, refused

pytest_plugins = ["pytester"]

USAGE_ERROR, OK, FAILED = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("args", [(), ("--gate", "1"), ("checks",), (".",), ("-k", "test_it")], ids=" ".join)
def test_a_criterion_needs_a_test(project: Project, args: tuple[str, ...]) -> None:
    assert project.run(*args).ret == OK
    project.page("1.1", "1.2", "1.10")
    assert refused(project.run(*args), "criteria without a test: 1.2, 1.10")


@pytest.mark.parametrize("args", [(), ("--gate", "1"), ("checks/test_it.py",)], ids=" ".join)
@pytest.mark.parametrize("id_", ["1.7", "2.1", "one"])
def test_a_test_names_an_existing_criterion(project: Project, args: tuple[str, ...], id_: str) -> None:
    project.tests(f"@proves('1.1', '{id_}')\ndef test_it(): pass")
    assert refused(project.run(*args), f"tests name criteria that no gate page lists: {id_}")


def test_another_gate_may_be_unfinished(project: Project) -> None:
    project.page("2.1", gate=2)
    assert project.run("--gate", "1").ret == OK
    assert refused(project.run(), "criteria without a test: 2.1")
    assert refused(project.run("--gate", "2"), "criteria without a test: 2.1")


def test_a_partial_run_does_not_need_every_test(project: Project) -> None:
    project.page("1.1", "1.2")
    for args in (["checks/test_it.py"], ["checks/test_it.py::test_it"], ["--ignore=checks/test_other.py"]):
        assert project.run(*args).ret == OK


@pytest.mark.parametrize("arg", ["checks/test_it.py", "--ignore=checks/test_other.py", "--lf"])
def test_a_gate_is_never_partial(project: Project, arg: str) -> None:
    """Part of a criterion's tests must not make it pass."""
    project.tests("@proves()\ndef test_other(): assert False", "test_other")
    assert refused(project.run("--gate", "1", arg), "runs every test of the gate")
    assert not (project.root / ".gates").exists()


def test_options_that_make_no_record(project: Project) -> None:
    assert refused(project.run("--record"), "--record needs --gate N")
    assert refused(project.run("--gate", "5"), "--gate 5: specs/gates/ lists no criterion")


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("# no front matter", "front matter"),
        ("---\ngate: 1\n---\n", "front matter"),
        ("---\ncriteria: {}\n---\n", "front matter"),
        ("---\ngate: 1\ncriteria: [one]\n---\n", "front matter"),
        ("---\ngate: 1\ncriteria: {\n---\n", "front matter"),
        ("---\ngate: 2\ncriteria: {'2.1': one}\n---\n", "must be of gate 1, not 2"),
        ("---\ngate: 1\ncriteria: {1.1: one}\n---\n", "criterion 1.1 is not a string '1.<n>'"),
        ("---\ngate: 1\ncriteria: {'2.1': one}\n---\n", "criterion '2.1' is not"),
        ("---\ngate: 1\ncriteria: {'1.x': one}\n---\n", "criterion '1.x' is not"),
        ("---\ngate: 1\ncriteria: {'1': one}\n---\n", "criterion '1' is not"),
        ("---\ngate: 1\ncriteria: {'1.1': ''}\n---\n", "criterion 1.1 has no sentence"),
        ("---\ngate: 1\ncriteria: {'1.1': one, '1.1': two}\n---\n", "1.1 is listed twice"),
    ],
)
def test_malformed_pages_are_refused(project: Project, page: str, text: str) -> None:
    project.write("specs/gates/gate1.md", page)
    result = project.run()
    assert refused(result, "gate1.md: ") and text in result.stderr.str()
