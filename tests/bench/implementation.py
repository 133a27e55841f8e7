"""What the benchmark runs: an implementation binds itself to a problem, is checked, then timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from tests.bench.problem import Problem, Shape


class Unsupported(Exception):
    """The implementation does not take this shape; the message says why."""


@dataclasses.dataclass(frozen=True)
class Eager:
    """The call that a user would write, where `launch` is not it: `call()` returns what the function does."""

    call: Callable[[], Any]
    what: str  # which function, with what it is given


@dataclasses.dataclass
class Bound:
    """An implementation ready to run one problem.

    launch(way) enqueues one call on torch's current stream and can be captured in a CUDA graph. `outputs()` gives,
    after reset() and launch(0), what that call produced, as a dict with some of
        o [N, T, HV, V]; states [N, T, HV, V, K], after every token; final [N, HV, V, K], after the last or accepted
        token (of a ring op, after the history, compared for the requests that fold).
    reset() undoes what launches changed in way 0 and poisons its outputs. `eager` is what the host's cost is measured
    on; without it that is launch(0).
    """

    launch: Callable[[int], Any]
    outputs: Callable[[], dict[str, Tensor]]
    reset: Callable[[], None]
    eager: Eager | None = None


class Implementation(Protocol):
    """`name` is "kernels/<program>" or "<peer>-<version>/<entry>"; `note` goes into its rows."""

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> frozenset[str]: ...

    @property
    def note(self) -> str: ...

    def absent(self) -> str:
        """Why it cannot run on this machine ("" if it can), for example which package is missing."""

    def bind(self, problem: Problem) -> Bound:
        """Raises Unsupported for a shape outside the implementation."""


def refuse_unless(shape: Shape, **allowed: Any) -> None:
    """Raise Unsupported unless each named field of `shape` is among the allowed values (one, or a tuple of them)."""
    for field, values in allowed.items():
        values = values if isinstance(values, tuple) else (values,)
        if getattr(shape, field) not in values:
            raise Unsupported(f"{field} is {getattr(shape, field)}, supported: {', '.join(map(str, values))}")
