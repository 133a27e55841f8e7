"""Deliberately wrong variants of the reference: what a suite must be able to see.

A suite loops over `names(...)`, builds each mutant in the form it tests (`recurrent`, `verify_gated_fwd`,
...: the reference's signatures) and shows that its own inputs at its own limit tell it from the reference:

    for name in mutants.names("step", "sequence", "gating", "pool"):
        mutants.verify_gated_fwd(name)(q, k, v, a, b, A_log, dt_bias, pool, ..., scale=None)

A mutant is one function. Its name is the mutant's name, its docstring the description. At level "step" it
replaces `recurrence.delta_step`; at every other level it gets the arguments of the call as an editable
namespace `c` together with `run`, which makes that call: an error in an input is an edit before `run()`, one
in a buffer an edit after.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from reference import gating, pool, recurrence
from reference.mutants import of_pool, of_recurrence  # noqa: F401 - importing them registers their mutants
from reference.mutants.registry import MUTANTS, Level, Mutant, names

__all__ = [
    "MUTANTS",
    "Level",
    "Mutant",
    "commit",
    "decode",
    "names",
    "recurrent",
    "verify_fwd",
    "verify_gated_fwd",
]


def _edited(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its call handed to `change(c, run)`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def mutated(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        c = SimpleNamespace(**bound.arguments)
        return change(c, lambda: function(**vars(c)))

    return mutated


def _build(function: Callable[..., Any], name: str, *levels: Level) -> Callable[..., Any]:
    mutant = MUTANTS[name]
    if mutant.level not in levels:
        raise ValueError(f"mutant {name!r} is of level {mutant.level!r}; here only {levels} exist")
    if mutant.level == "gating":
        return functools.partial(function, gates=_edited(gating.gates, mutant.change))
    if mutant.level in ("step", "sequence") and function is not recurrence.recurrent:
        return functools.partial(function, recurrence=recurrent(name))
    if mutant.level == "step":
        return functools.partial(function, step=mutant.change)
    return _edited(function, mutant.change)


def recurrent(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """recurrence.recurrent with a mutant of level step or sequence."""
    return _build(recurrence.recurrent, name, "step", "sequence")


def verify_fwd(name: str) -> Callable[..., None]:
    """pool.verify_fwd with a mutant of level step, sequence or pool."""
    return _build(pool.verify_fwd, name, "step", "sequence", "pool")


def verify_gated_fwd(name: str) -> Callable[..., None]:
    """pool.verify_gated_fwd with a mutant of level step, sequence, gating or pool."""
    return _build(pool.verify_gated_fwd, name, "step", "sequence", "gating", "pool")


def decode(name: str) -> Callable[..., None]:
    """pool.decode with a mutant of level step, sequence or gating."""
    return _build(pool.decode, name, "step", "sequence", "gating")


def commit(name: str) -> Callable[..., None]:
    """pool.commit with a mutant of level commit."""
    return _build(pool.commit, name, "commit")
