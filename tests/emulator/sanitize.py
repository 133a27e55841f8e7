"""Run a program under ThreadSanitizer, AddressSanitizer or UndefinedBehaviorSanitizer.

The sanitized kernel is a program of its own (g++ links the sanitizer, nothing is preloaded), started in a
subprocess on copies of the arguments: a few milliseconds, and neither torch nor TileLang is instrumented.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kernels.runtime import Lowered
from tests.emulator.arguments import Launch, Signature
from tests.emulator.build import ADDRESS, THREAD, UNDEFINED, Flavour, compile_kernel
from tests.emulator.errors import EmulatorError
from tests.emulator.source import signature

Sanitizer = Literal["thread", "address", "undefined"]

_FLAVOURS: dict[str, Flavour] = {f.name: f for f in (THREAD, ADDRESS, UNDEFINED)}
_OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=0 history_size=7 exitcode=0",
    "ASAN_OPTIONS": "halt_on_error=0 detect_leaks=0 detect_stack_use_after_return=0 exitcode=0",
    "UBSAN_OPTIONS": "halt_on_error=0",
}
_REPORTED = re.compile(r"(?:WARNING: Thread|ERROR: Address)Sanitizer: ([\w -]+?)(?= \(| on |$)", re.MULTILINE)
_RUNTIME_ERROR = re.compile(r"(\w+\.(?:cu|h):\d+):\d+: runtime error: (.*)")
_LINE = re.compile(r"kernel\.cu:\d+")


@dataclass(frozen=True)
class Report:
    """What a sanitizer said about one run."""

    sanitizer: Sanitizer
    findings: list[str]  # one line each with kernel.cu:<line of the generated source>, without repetitions
    text: str  # everything the program printed
    outputs: list[Any]  # the arguments after the run (copies of the tensors); empty if the program did not survive it
    error: str | None  # the emulator's own message, if the launch ended with one


def run(
    lowered: Lowered,
    args: Sequence[Any],
    sanitizer: Sanitizer = "thread",
    patch: Callable[[str], str] | None = None,
    timeout: float = 300.0,
) -> Report:
    """Run `lowered` on copies of `args` (PrimFunc order) under one sanitizer.

    "thread" finds data races (missing barriers, blocks that write one location), "address" accesses outside a
    tensor's storage or a local array, "undefined" misaligned vector accesses and int32 overflow in index arithmetic.
    `patch` edits the generated source first. Raises EmulatorError if the program cannot be built or does not finish.
    """
    source = lowered.source if patch is None else patch(lowered.source)
    launch = Signature(lowered.prim_func, signature(source, lowered.entry), lowered.extents).bind(args)
    program = compile_kernel(source, lowered.entry, _FLAVOURS[sanitizer])
    with tempfile.TemporaryDirectory() as scratch:
        call, result = Path(scratch, "call"), Path(scratch, "result")
        storages = _storages(args)
        _write_call(call, launch, storages)
        text = _execute([str(program), str(call), str(result)], timeout)
        findings = _findings(text)
        if not result.exists() and not findings:
            raise EmulatorError(f"the sanitized program ended early\n{text[-3000:]}")
        outputs = _read_result(result, args, storages) if result.exists() else []
    error = re.search(r"^EMULATOR: (.*)$", text, re.MULTILINE)
    return Report(sanitizer, findings, text, outputs, error[1] if error else None)


def _findings(text: str) -> list[str]:
    found = [f"{m[2]} at {m[1]}" for m in _RUNTIME_ERROR.finditer(text)]
    reports = list(_REPORTED.finditer(text))
    ends = [*(m.start() for m in reports[1:]), len(text)]
    for report, end in zip(reports, ends, strict=False):
        # the stacks of one report: the access, then (for a race) the access it conflicts with
        lines = list(dict.fromkeys(_LINE.findall(text, report.end(), end)))
        found.append(" ".join([report[1], "at", *lines[:2]] if lines else [report[1]]))
    return list(dict.fromkeys(found))


def _execute(command: list[str], timeout: float) -> str:
    # TSan needs a fixed address space layout
    setarch = shutil.which("setarch")
    prefix = [setarch, "x86_64", "-R"] if setarch else []
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        prefix = []
    try:
        result = subprocess.run(
            [*prefix, *command], capture_output=True, timeout=timeout, check=False, env={**os.environ, **_OPTIONS}
        )
    except subprocess.TimeoutExpired as expired:
        raise EmulatorError(f"the sanitized program did not finish in {timeout} s") from expired
    return (result.stdout + result.stderr).decode(errors="replace")


def _storages(args: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    """Storages of the tensors by address: tensors that share memory share it in the sanitized program too."""
    found = (a.untyped_storage() for a in args if isinstance(a, torch.Tensor))
    return {s.data_ptr(): s for s in found}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _write_call(path: Path, launch: Launch, storages: dict[int, torch.UntypedStorage]) -> None:
    index = {address: i for i, address in enumerate(storages)}
    with path.open("wb") as file:
        file.write((ctypes.c_int32 * 8)(*launch.extents, len(storages), len(launch.values)))
        for storage in storages.values():
            file.write(ctypes.c_int64(storage.nbytes()))
            file.write(_bytes(storage).numpy().data)
        for ctype, value in launch.values:
            pair = (ctypes.c_int64 * 2)(-1, 0)
            if isinstance(value, torch.Tensor):
                base = value.untyped_storage().data_ptr()
                pair[0], pair[1] = index[base], value.data_ptr() - base
            else:
                scalar = ctype(value)
                ctypes.memmove(ctypes.byref(pair, 8), ctypes.byref(scalar), ctypes.sizeof(scalar))
            file.write(pair)


def _read_result(path: Path, args: Sequence[Any], storages: dict[int, torch.UntypedStorage]) -> list[Any]:
    content = bytearray(path.read_bytes())
    copies, at = {}, 0
    for address, storage in storages.items():
        size = storage.nbytes()
        copies[address] = torch.empty(size, dtype=torch.uint8)
        if size:
            copies[address].copy_(torch.frombuffer(content, dtype=torch.uint8, count=size, offset=at))
        at += size
    outputs: list[Any] = []
    for a in args:
        if not isinstance(a, torch.Tensor):
            outputs.append(a)
            continue
        fresh = copies[a.untyped_storage().data_ptr()].untyped_storage()
        outputs.append(torch.empty(0, dtype=a.dtype).set_(fresh, a.storage_offset(), a.size(), a.stride()))
    return outputs
