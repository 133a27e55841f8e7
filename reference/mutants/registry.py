"""What a mutant is, and the decorator that registers one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Level = Literal["step", "sequence", "gating", "pool", "commit"]
F = TypeVar("F", bound=Callable[..., Any])
Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    level: Level
    description: str
    needs: str  # what the inputs have to contain for any difference to exist; "" if any input shows it
    subtle: bool  # about the size of one bf16 rounding: needs results that are not stored in bf16
    change: Callable[..., Any]


MUTANTS: dict[str, Mutant] = {}


def mutant(level: Level, needs: str = "", subtle: bool = False) -> Callable[[F], F]:
    """Registers the decorated function as the `change` of a mutant of its name."""

    def register(change: F) -> F:
        name = change.__name__
        MUTANTS[name] = Mutant(name, level, inspect.getdoc(change) or "", needs, subtle, change)
        return change

    return register


def names(*levels: Level, subtle: bool = True) -> list[str]:
    """The mutants of these levels (none given: all), without the subtle ones if asked."""
    return [m.name for m in MUTANTS.values() if (not levels or m.level in levels) and (subtle or not m.subtle)]
