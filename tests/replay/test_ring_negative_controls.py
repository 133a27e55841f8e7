"""Gate 5: the suite's own inputs and limits see every mutant of recurrence and bookkeeping behind a ring, and every
mutated kernel of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import reference.ring
from kernels import runtime
from kernels.replay.plan import cursors_plan
from kernels.runtime import Program
from reference import mutants
from tests.emulator import EmulatedKernel, load
from tests.gate_engine import Evidence
from tests.launch import emulated, refuses
from tests.replay.ring_cases import Server, split
from tests.replay.test_ring_programs import VARIANTS

Replacement = str | Callable[[re.Match[str]], str]


def ordinary(**options: Any) -> None:
    """Steps in which some slots fold, some have a history and some have neither, and padding and rows of no request
    beside them; the third verify is repeated."""
    server = Server(N=3, max_tokens=5, capacity=6, **options)
    rounds = (([5, 5, 5], (5, 2, 4)), ([4, 1, 5], (3, 1, 3)), ([5, 0, 3], (4, 0, 3)), ([2, 5, 5], (2, 5, 1)))
    for step, (lengths, accepted) in enumerate((*rounds, ([5, 4, 0], (1, 1, 0)))):
        slots = [*server.slots[:2], -1, server.slots[2]]
        padded = [*lengths[:2], 2, lengths[2]]
        inputs = server.tokens(sum(padded) + 2)
        call = server.step(padded, accept=False, slots=slots, inputs=inputs)
        if step == 2:
            server.check(server.call(padded, inputs, slots), Evidence())
            assert call.starts[-1] == sum(padded)
        server.accept([*accepted[:2], 2, accepted[2]])
        server.forget()
    assert server.folds > 3


def history_alone(**options: Any) -> None:
    """The state starts at zero, nothing is forgotten and the last tokens have no values: all of o is the history's."""
    server = Server(N=2, max_tokens=6, capacity=12, **options)
    server.A_log.fill_(-5.0)
    server.pool.view.zero_()
    for step in range(3):
        inputs = server.tokens(12)
        if step == 2:
            inputs.v.zero_()
        server.step([6, 6], accept=False, inputs=inputs)
        server.accept([6, 5])


def state_alone(**options: Any) -> None:
    """No token has values: all of o is what is left of the state, folded once."""
    server = Server(N=2, max_tokens=6, capacity=6, **options)
    server.A_log.fill_(-3.0)
    for _ in range(3):
        inputs = server.tokens(12)
        inputs.v.zero_()
        server.step([6, 6], accept=False, inputs=inputs)
        server.accept([6, 3])


def many_folds(**options: Any) -> None:
    """The rows of the ring are gone through twice."""
    server = Server(N=2, max_tokens=3, capacity=2, **options)
    while server.wrapped < 4:
        server.step([3, 3], accept=False)
        server.accept([3, 2])


def extreme_gates() -> None:
    server = Server(N=1, max_tokens=6, capacity=6, gate=torch.float32, pool=torch.float32)
    server.A_log[0], server.A_log[1] = -100.0, 100.0
    server.dt_bias[0], server.dt_bias[1] = 3.0, 0.0
    for _ in range(3):
        inputs = server.tokens(6)
        inputs.a[:, 0] = torch.linspace(10, 100, 6)
        inputs.a[:, 1] = -150.0
        server.step([6], accept=False, inputs=inputs)
        server.accept([6])


def faint_keys() -> None:
    server = Server(N=1, max_tokens=6, capacity=6, pool=torch.float32)
    for _ in range(3):
        inputs = server.tokens(6)
        inputs.q.mul_(2.0**-13)
        inputs.k.mul_(2.0**-13)
        server.step([6], accept=False, inputs=inputs)
        server.accept([6])


#: the kinds of sessions of this suite, in small
SESSIONS: dict[str, Callable[[], None]] = {
    "ordinary": ordinary,
    "fp32 pool": functools.partial(ordinary, pool=torch.float32),
    "history alone": history_alone,
    "state alone": state_alone,
    "many folds": many_folds,
    "beta in (0, 2)": functools.partial(ordinary, allow_neg_eigval=True),
    "scale": functools.partial(ordinary, scale=0.5),
    "scale of zero": functools.partial(ordinary, scale=0.0),
    "extreme gates": extreme_gates,
    "faint keys": faint_keys,
}


def is_seen(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> bool:
    """Whether any session refuses functions in the place of those of `reference.ring`."""
    for name, function in functions.items():
        monkeypatch.setattr(reference.ring, name, function)
    return any(refuses(session) for session in SESSIONS.values())


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("name", SESSIONS)
def test_the_reference_itself_passes(name: str) -> None:
    SESSIONS[name]()


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("name", mutants.names("step", "sequence", "gating"))
def test_mutant_of_the_recurrence_is_seen(name: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    of_verify = mutants.verify_gated_fwd(name)
    assert isinstance(of_verify, functools.partial)
    mutant = functools.partial(reference.ring.verify, **of_verify.keywords)
    evidence.equal("mutant of the recurrence refused", is_seen(monkeypatch, verify=mutant), True)


VERIFY: Callable[..., None] = reference.ring.verify
ACCEPT: Callable[..., None] = reference.ring.accept
CURSORS, MARKS, RING, POOL = 12, 13, 11, 7  # arguments of verify


def changed_cursors(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """A verify that sees other cursors."""

    def verify(*args: Any, **options: Any) -> None:
        VERIFY(*args[:CURSORS], change(args[CURSORS].clone()), *args[CURSORS + 1 :], **options)

    return verify


def without(column: int) -> Callable[[Tensor], Tensor]:
    def change(cursors: Tensor) -> Tensor:
        cursors[:, column] = 0
        return cursors

    return change


def less_history(cursors: Tensor) -> Tensor:
    cursors[:, 2] = (cursors[:, 2] - 1).clamp(min=0)
    return cursors


def history_over_what_is_folded(cursors: Tensor) -> Tensor:
    cursors[:, 0] -= cursors[:, 1]
    return cursors


def folds_again(*args: Any, **options: Any) -> None:
    args[MARKS].fill_(-1)
    VERIFY(*args, **options)


def folds_one_of_two(*args: Any, **options: Any) -> None:
    """The second slot that is to be folded counts as folded."""
    cursors, marks = args[CURSORS], args[MARKS]
    due = ((cursors[:, 1] > 0) & (marks != cursors[:, 3, None, None]).any(-1).any(-1)).nonzero().flatten().tolist()
    for slot in due[1::2]:
        marks[slot] = cursors[slot, 3]
    VERIFY(*args, **options)


def keeps_no_new_tokens(*args: Any, **options: Any) -> None:
    before = [x.clone() for x in args[RING]]
    VERIFY(*args, **options)
    for x, old in zip(args[RING], before, strict=True):
        x.copy_(old)


def swapped_bands(*args: Any, **options: Any) -> None:
    """The two halves of V trade places in a state that is folded."""
    before = args[POOL].clone()
    VERIFY(*args, **options)
    for slot, (old, new) in enumerate(zip(before, args[POOL], strict=True)):
        if not torch.equal(old, new):
            args[POOL][slot] = new.roll(new.shape[-2] // 2, dims=-2)


def padding_is_slot_0(*args: Any, **options: Any) -> None:
    VERIFY(*args[:8], args[8].clamp(min=0), *args[9:], **options)


def state_of_the_slot_next_door(*args: Any, **options: Any) -> None:
    VERIFY(*args[:8], torch.where(args[8] >= 0, (args[8] + 1) % len(args[POOL]), -1), *args[9:], **options)


MUTANTS_OF_VERIFY: dict[str, Callable[..., None]] = {
    "the history is ignored": changed_cursors(without(2)),
    "tokens to fold are ignored": changed_cursors(without(1)),
    "one token of the history is lost": changed_cursors(less_history),
    "the history begins at what is folded": changed_cursors(history_over_what_is_folded),
    "rows do not move on": changed_cursors(without(0)),
    "folds again": folds_again,
    "folds one of two": folds_one_of_two,
    "keeps no new tokens": keeps_no_new_tokens,
    "swapped bands": swapped_bands,
    "padding is slot 0": padding_is_slot_0,
    "the slot next door": state_of_the_slot_next_door,
}


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("name", MUTANTS_OF_VERIFY)
def test_mutant_of_verify_is_seen(name: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence.equal("mutant of verify refused", is_seen(monkeypatch, verify=MUTANTS_OF_VERIFY[name]), True)


def accept_as(**change: Callable[[Any], Any]) -> Callable[..., None]:
    """An accept with other arguments."""

    def accept(cursors: Tensor, slots: Tensor, accepted: Tensor, **options: Any) -> None:
        given = {"accepted": accepted, **options}
        given |= {name: edit(given[name]) for name, edit in change.items()}
        ACCEPT(cursors, slots, **given)

    return accept


def first_row_stays(cursors: Tensor, *args: Any, **options: Any) -> None:
    base = cursors[:, 0].clone()
    ACCEPT(cursors, *args, **options)
    cursors[:, 0] = base


def folds_are_not_counted(cursors: Tensor, *args: Any, **options: Any) -> None:
    ACCEPT(cursors, *args, **options)
    cursors[:, 3] = 0


def accepted_tokens_are_folded_too(cursors: Tensor, *args: Any, **options: Any) -> None:
    ACCEPT(cursors, *args, **options)
    folds = cursors[:, 1] > 0
    cursors[:, 1] += torch.where(folds, cursors[:, 2], 0)
    cursors[:, 2] = torch.where(folds, 0, cursors[:, 2])


MUTANTS_OF_ACCEPT: dict[str, Callable[..., None]] = {
    "the last token is dropped": accept_as(accepted=lambda x: x - 1),
    "one token at least": accept_as(accepted=lambda x: x.clamp(min=1)),
    "requests trade lengths": accept_as(accepted=lambda x: x.flip(0)),
    "all tokens are accepted": accept_as(accepted=lambda x: torch.full_like(x, 16)),
    "the capacity is one less": accept_as(capacity=lambda x: x - 1),
    "there is one row more": accept_as(rows=lambda x: x + 1),
    "rows never end": accept_as(rows=lambda x: 1 << 20),
    "the first row stays": first_row_stays,
    "folds are not counted": folds_are_not_counted,
    "accepted tokens are folded too": accepted_tokens_are_folded_too,
}


@pytest.mark.criterion("5.35")
@pytest.mark.parametrize("name", MUTANTS_OF_ACCEPT)
def test_mutant_of_accept_is_seen(name: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence.equal("mutant of accept refused", is_seen(monkeypatch, accept=MUTANTS_OF_ACCEPT[name]), True)


#: (what is wrong, pattern in the generated CUDA of kernels.replay.window, replacement, most CTAs)
WINDOW_MUTANTS: tuple[tuple[str, str, Replacement, int | None], ...] = (
    ("beta of old tokens halved", r"(\(\(float\*\)old_beta\)\[[^=;]*\] = \()beta_scale", r"\g<1>0.5f", None),
    ("no decay of new tokens", r"(\(\(float\*\)decay\)\[[^=;]*\] = )expf", r"\g<1>1.0f + 0.0f * expf", None),
    ("the state does not decay over the history", r"= \((P\w*\[\w+\]) \* history_decay\w*\)", r"= \1", None),
    ("values of the history dropped", r"tl::mma_sync<[^;]*\(M_h\w* \+ \d\)[^;]*;", "", None),
    ("keys of the history dropped", r"tl::mma_sync<[^;]*\(N_h\w* \+ \d\)[^;]*;", "", None),
    ("the state does not decay in a fold", r"\(decay_\d+ \* (?=\(*(?:\(float\))?state)", "(1.0f * ", None),
    ("nothing is folded", r"\(marked\w* != [^()]*\)", "(false)", None),
    ("a repeated verify folds again", r"\(marked\w* != [^()]*\)", "(true)", None),
    ("tokens not waited for", r"tl::cp_async_wait<1>\(\);", "", None),
    ("new keys not kept", r"\*\(uint4\*\)\(ring_k [^;]*;", "", None),
    ("new values not kept", r"\*\(uint4\*\)\(ring_v [^;]*;", "", None),
    ("new gates not kept", r"(?m)^\s*ring_a\[[^;]*;", "", None),
    ("rows of no request not cleared", r"\(unused\w* < NT\)", "(false)", None),
    ("nothing is folded in the large tile", r"\(marked\w* != [^()]*\)", "(false)", 3),
)  # fmt: skip

#: the same of kernels.replay.cursors
CURSOR_MUTANTS: tuple[tuple[str, str, Replacement], ...] = (
    ("the capacity is one less", r"<= capacity", "< capacity"),
    ("all tokens accepted", r"min\(accepted\[((?:[^][]|\[[^]]*\])*)\], most\)", "most"),
    ("folds are not counted", r"\] \+ 1\);", "] + 0);"),
    ("rows never end", r"\(base - rows\)", "base"),
    ("the first row stays", r"base = \((cursors\[[^;]*?\]) \+ cursors\[[^;]*\]\);", r"base = \1;"),
    ("accepted tokens are added to what is folded", r"= live;", "= (live + L);"),
)


def only(monkeypatch: pytest.MonkeyPatch, module: str, pattern: str, replacement: Replacement) -> None:
    """The launches that follow run mutated programs of one module, compiled once, and the others as they are.

    The pattern has to be there: a missing one is an error, not a refused kernel.
    """

    def patch(source: str) -> str:
        changed, count = re.subn(pattern, replacement, source)
        assert count, f"the pattern {pattern!r} is not in the generated source"
        return changed

    @functools.cache
    def mutated(program: Program) -> EmulatedKernel:
        return load(runtime.lower(program), patch=patch)

    def launch(program: Program, *args: Any) -> None:
        (mutated if program.module == module else emulated)(program)(*args)

    program = VARIANTS[0] if module == VARIANTS[0].module else cursors_plan()
    patch(runtime.lower(program).source)
    monkeypatch.setattr(runtime, "cpu_launcher", launch)


def sessions_of(launcher: str) -> tuple[Callable[[], None], ...]:
    """Sessions of one program, for mutated kernels."""
    return (ordinary, history_alone) if launcher == "window" else (ordinary, many_folds)


@pytest.mark.criterion("5.35")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("ctas", (None, 3))
def test_the_kernel_itself_passes(ctas: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    split(monkeypatch, ctas)
    for session in sessions_of("window"):
        session()


@pytest.mark.criterion("5.35")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("mutant", WINDOW_MUTANTS, ids=[row[0] for row in WINDOW_MUTANTS])
def test_mutated_window_is_seen(
    mutant: tuple[str, str, Replacement, int | None], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pattern, replacement, ctas = mutant
    split(monkeypatch, ctas)
    only(monkeypatch, "kernels.replay.window", pattern, replacement)
    evidence.equal("mutated kernel refused", any(refuses(session) for session in sessions_of("window")), True)


@pytest.mark.criterion("5.35")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("mutant", CURSOR_MUTANTS, ids=[row[0] for row in CURSOR_MUTANTS])
def test_mutated_cursors_are_seen(
    mutant: tuple[str, str, Replacement], evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pattern, replacement = mutant
    only(monkeypatch, "kernels.replay.cursors", pattern, replacement)
    evidence.equal("mutated kernel refused", any(refuses(session) for session in sessions_of("cursors")), True)
