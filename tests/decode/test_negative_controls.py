"""Gate 2, paged decode: the suite's own inputs and limits see every mutant of the reference and of the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reference.pool
from kernels import runtime
from reference import mutants
from tests.decode.cases import DecodeCase, check, make, most_requests_of_the_small_tile, set_slots
from tests.emulator import load
from tests.gate_engine import Evidence
from tests.launch import refuses

FEW, MANY = 4, most_requests_of_the_small_tile() + 1


def extreme(case: DecodeCase) -> DecodeCase:
    case.A_log[0], case.A_log[1] = -100.0, 100.0
    case.dt_bias[0], case.dt_bias[1] = 3.0, 0.0
    case.a[:, 0] = torch.linspace(10, 100, len(case.a)).to(case.a)
    case.a[:, 1] = -150.0
    return case


def faint(case: DecodeCase) -> DecodeCase:
    case.q.mul_(2.0**-13)
    case.k.mul_(2.0**-13)
    return case


def padded(case: DecodeCase) -> DecodeCase:
    """Two requests are padding whose inputs hold NaN, and one writes beyond the pool."""
    slots = len(case.pool.view)
    case.read[case.read == 0], case.read[case.read == slots - 1] = slots - 2, 1
    set_slots(case.read, -1, slots)
    for x in (case.mixed, case.a, case.b):
        x[:2] = torch.nan
    if case.write is not None:
        case.write[2] = -1
    return case


#: the kinds of inputs of this suite, in small
CASES: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: make(FEW),
    "fp32 pool": lambda: make(FEW, pool=torch.float32),
    "moves": lambda: make(FEW, moves=True),
    "padded": lambda: padded(make(FEW, slots=12)),
    "padded, moves": lambda: padded(make(FEW, slots=12, moves=True)),
    "beta in (0, 2)": lambda: make(FEW, allow_neg_eigval=True),
    "extreme gates": lambda: extreme(make(FEW, pool=torch.float32, gate=torch.float32)),
    "scale 0": lambda: make(FEW, scale=0.0),
    "faint keys": lambda: faint(make(FEW, pool=torch.float32)),
}


def refused(case: DecodeCase) -> bool:
    """Whether `check` refuses what a call left behind."""
    return refuses(lambda: check(case, Evidence()))


def is_seen(function: Callable[..., None], make_case: Callable[[], DecodeCase]) -> bool:
    """Whether `check` refuses what `function`, of the reference's signature, computes."""
    case = make_case()
    try:
        case.run(function)
    except (AssertionError, IndexError, RuntimeError):
        return True
    return refused(case)


@pytest.mark.criterion("2.13")
@pytest.mark.parametrize("name", CASES)
def test_the_reference_itself_passes(name: str) -> None:
    assert not is_seen(reference.pool.decode, CASES[name])


#: one token has no order of tokens
SEQUENCES = ("cumulative_decay", "tokens_reversed")


@pytest.mark.criterion("2.13")
@pytest.mark.parametrize("name", [x for x in mutants.names("step", "sequence", "gating") if x not in SEQUENCES])
def test_mutant_of_the_reference_is_seen(name: str, evidence: Evidence) -> None:
    seen_by = [case for case, make_case in CASES.items() if is_seen(mutants.decode(name), make_case)]
    evidence.at_least("cases that see a mutant of the reference", len(seen_by), 1)


@pytest.mark.criterion("2.13")
@pytest.mark.parametrize("name", SEQUENCES)
def test_what_needs_several_tokens_is_no_error_of_one(name: str) -> None:
    """The mutants left out above compute what the reference does: there is nothing to see."""
    assert "several tokens" in mutants.MUTANTS[name].needs
    assert not any(is_seen(mutants.decode(name), make_case) for make_case in CASES.values())


def paging(change: Callable[..., None]) -> Callable[..., None]:
    """The reference's decode with an error in what is read and stored by index."""

    def wrong(*args: Any, **options: Any) -> None:
        *inputs, pool, read, o, write = args
        call = lambda **edits: reference.pool.decode(  # noqa: E731
            *inputs, *({"pool": pool, "read": read, "o": o, "write": write} | edits).values(), **options
        )
        change(call, pool, read, o, write)

    return wrong


def moved_in_place_too(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call()
    if write is not None:
        call(write=None, o=o.clone())


def write_ignored(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call(write=None)


def padding_reads_slot_0(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call(read=read.clamp(0, len(pool) - 1))


def padding_leaves_the_output(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    before = o.clone()
    call()
    absent = (read < 0) | (read >= len(pool))
    o[absent] = before[absent]


def outside_write_clears_the_output(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call()
    if write is not None:
        o[(write < 0) | (write >= len(pool))] = 0


def nothing_stored(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call(pool=pool.clone())


def bands_swapped(call: Callable[..., None], pool: Any, read: Any, o: Any, write: Any) -> None:
    call()
    o.copy_(o.roll(o.shape[-1] // 2, dims=-1))


PAGING = (
    moved_in_place_too, write_ignored, padding_reads_slot_0, padding_leaves_the_output,
    outside_write_clears_the_output, nothing_stored, bands_swapped,
)  # fmt: skip


@pytest.mark.criterion("2.13")
@pytest.mark.parametrize("change", PAGING, ids=lambda change: change.__name__)
def test_errors_of_paging_are_seen(change: Callable[..., None], evidence: Evidence) -> None:
    seen_by = [case for case, make_case in CASES.items() if is_seen(paging(change), make_case)]
    evidence.at_least("cases that see an error of paging", len(seen_by), 1)


#: (what is wrong, pattern in the generated CUDA, replacement); each pattern stands once in either tile
KERNEL_MUTANTS = (
    ("state does not decay", r"__fmul_rn\((decay\w*), S(\w*)\[", r"__fmul_rn(1.0f + 0.0f * \1, S\2["),
    ("output before the update", r"__fmaf_rn\(u(\w*)\[(\w+)\], kq", r"__fmaf_rn(0.0f * u\1[\2], kq"),
    ("beta not applied", r"= __fmul_rn\(beta(\w*), __fmaf_rn", r"= __fmul_rn(1.0f + 0.0f * beta\1, __fmaf_rn"),
    ("state without its sign", r"__fmaf_rn\(\((decay\w*) \* -0x1p\+0f", r"__fmaf_rn((\1 * 0x1p+0f"),
    ("a lane missing in the sums", r"(products\w*\[\w+\]), 1, 32\)", r"0.0f * \1, 1, 32)"),
    ("head map h % H", r"(\(k \+ .*?) >> \(int64_t\)([45])\) \* \(int64_t\)128\)", None),
    (
        "padding writes to the ends of the pool",
        r"if \(\(present\w* && \(0 <= (target\w*)\)\) && \(target\w* < SLOTS\)\)",
        r"\1 = max(min(\1, SLOTS - 1), 0); if (true)",
    ),
    ("padding outputs something", r"= \(present(\w*) \? ", r"= (true || present\1 ? "),
    ("no norm of the key", r"(key\w*)(\[[^\]]*\]) = __fmul_rn\(\1\2, factor(\w*)\[0\]\)", r"\1\2 = \1\2"),
)


def mutate(source: str, pattern: str, replacement: str | None, tile: int) -> str:
    """`source` with the pattern replaced in one of the two tiles."""
    few, many = source.split("\n  } else {\n")
    parts = [few, many]
    if replacement is None:  # value head h reads key head h % 2: one bit of the CTA's number further down
        replacement = r"\1 >> (int64_t)" + str(4 - tile) + r" & (int64_t)1) * (int64_t)128)"
    parts[tile], count = re.subn(pattern, replacement, parts[tile])
    assert count, f"the pattern {pattern} is not in tile {tile} of the generated source"
    return "\n  } else {\n".join(parts)


@pytest.mark.criterion("2.1", "2.13")
@pytest.mark.parametrize("tile", (0, 1), ids=("few requests", "many requests"))
@pytest.mark.parametrize(("name", "pattern", "replacement"), KERNEL_MUTANTS, ids=[row[0] for row in KERNEL_MUTANTS])
def test_mutated_kernel_is_seen(
    name: str, pattern: str, replacement: str | None, tile: int, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in one tile: seen by as many requests as that tile takes, and by them alone."""

    def launcher(program: runtime.Program, *args: Any) -> None:
        load(runtime.lower(program), patch=lambda source: mutate(source, pattern, replacement, tile))(*args)

    monkeypatch.setattr(runtime, "cpu_launcher", launcher)
    seen = []
    for N in (FEW, MANY):
        case = padded(make(N, slots=N + 8))
        case.run()
        seen.append(refused(case))
    evidence.equal("refused with few and with many requests", seen, [tile == 0, tile == 1])
