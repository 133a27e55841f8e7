"""Gate 4: who decides about a prepass: the argument, else the environment variable, else the rule, which says never."""

from __future__ import annotations

from typing import Any

import pytest

from kernels import prepass, runtime
from kernels.prepass.api import VARIABLE
from tests.gate_engine import Evidence
from tests.prepass import cases as prepass_cases
from tests.shapes import BATCHES, HEADS, TOKENS
from tests.verify.cases import make

ALONE, BEHIND = ["kernels.verify.chunk"], ["kernels.prepass.program", "kernels.verify.chunk"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of the programs that calls launch; nothing runs."""
    modules: list[str] = []

    def note(program: runtime.Program, *_: Any) -> None:
        modules.append(program.module)

    monkeypatch.setattr(runtime, "cpu_launcher", note)
    monkeypatch.delenv(VARIABLE, raising=False)
    return modules


@pytest.mark.criterion("4.7")
@pytest.mark.parametrize(
    ("argument", "variable", "rule", "expected"),
    (
        (None, None, False, ALONE),
        (None, None, True, BEHIND),
        (None, "0", True, ALONE),
        (None, "1", False, BEHIND),
        (False, "1", True, ALONE),
        (True, "0", False, BEHIND),
        (True, "nonsense", False, BEHIND),  # not read
    ),
)
def test_argument_then_variable_then_rule(
    argument: bool | None, variable: str | None, rule: bool, expected: list[str], launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[tuple[int, ...]] = []

    def stands_in(*shape: int) -> bool:
        asked.append(shape)
        return rule

    monkeypatch.setattr(prepass.api, "should_use_prepass", stands_in)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    make(T=(12, 5), prepass=argument).run()
    assert launched == expected
    assert asked == ([(2, 17, 2, 4)] if argument is None and variable is None else [])


@pytest.mark.criterion("4.7")
def test_the_variable_is_read_at_the_call(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(T=(3,))
    for value, expected in (("1", BEHIND), ("0", ALONE), ("1", BEHIND)):
        monkeypatch.setenv(VARIABLE, value)
        launched.clear()
        case.run()
        assert launched == expected


@pytest.mark.criterion("4.7")
@pytest.mark.parametrize("value", ("", "true", "2", " 1"))
def test_any_other_value_raises(value: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=r"HOPPER_GDN_PREPASS is .* must be '0' .* or '1' .*; unset it") as caught:
        make(T=(3,)).run()
    assert repr(value) in str(caught.value) and not launched


@pytest.mark.criterion("4.7")
@pytest.mark.parametrize(
    ("options", "expected"),
    (({"lossless": True}, ["kernels.verify.recurrent"]), ({"fuse_gating": False}, ALONE)),
    ids=("lossless", "host gates"),
)
def test_calls_without_a_place_for_a_prepass_ignore_the_variable(
    options: dict[str, Any], expected: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    make(T=(3,), **options).run()
    assert launched == expected


@pytest.mark.criterion("4.8")
def test_the_rule_says_never(evidence: Evidence) -> None:
    shapes = [(N, N * T, H, HV) for N in (*BATCHES, 1024) for T in TOKENS for H, HV in (*HEADS, (1, 1), (1, 8))]
    evidence.equal("shapes with a prepass", sum(prepass.should_use_prepass(*shape) for shape in shapes), 0)
    evidence.note("shapes asked", len(shapes))


@pytest.mark.criterion("4.8")
@pytest.mark.parametrize("T", ((1,), (12,) * 3, (33, 0)), ids=str)
def test_no_call_launches_one_unasked(T: tuple[int, ...], launched: list[str]) -> None:
    make(T=T, steps=max(*T, 3)).run()
    assert launched == ALONE


@pytest.mark.criterion("4.8")
def test_no_tokens_launch_nothing(launched: list[str]) -> None:
    prepass_cases.make(0).run()
    make(T=(0,), steps=4, prepass=True).run()
    assert launched == []
