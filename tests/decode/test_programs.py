"""Gate 2: what the compiler makes of the paged decode programs, and of every program's programmatic launch."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.decode.test_dense_programs as dense
import tests.prepass.test_programs as prepass
import tests.replay.test_commit_programs as commit
import tests.replay.test_programs as replay
import tests.replay.test_ring_programs as ring
import tests.verify.test_lossless_contract as lossless
import tests.verify.test_programs as chunk
from kernels import runtime
from kernels.decode import api
from kernels.decode.config import Config
from kernels.decode.plan import plan
from kernels.runtime import Program
from kernels.verify import plan as verify_plan
from kernels.verify.plan import paged_plan
from probes import toolchain
from tests.decode.cases import check, make, most_requests_of_the_small_tile, set_slots
from tests.emulator import sanitize
from tests.gate_engine import Evidence
from tests.launch import watch
from tests.machine_code import without_spills

MODULE = "kernels.decode.paged"


def planned(**facts: Any) -> Config:
    usual: dict[str, Any] = {
        "H": 2, "HV": 4, "K": 128, "V": 128, "pool": "bfloat16", "gate_dtype": "bfloat16", "bias_dtype": "float32",
        "l2norm": True, "packed": False, "moves": False,
    }  # fmt: skip
    config = plan(**usual | facts).config
    assert isinstance(config, Config)
    return config


#: as the other tests call them, and whole models
VARIANTS = (
    planned(),
    planned(pool="float16"),
    planned(pool="float32"),
    planned(packed=True, moves=True),
    planned(H=1, HV=2, V=64, pool="float32", gate_dtype="float16", bias_dtype="bfloat16"),
    planned(H=1, HV=2, pool="float32", l2norm=False),
    planned(H=2, HV=8, V=256, gate_dtype="float32", bias_dtype="bfloat16"),
    planned(H=16, HV=32),
    planned(H=16, HV=64, pool="float32", packed=True),
)


@pytest.mark.criterion("2.12", "2.15")
@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: Program("paged", c).label)
def test_machine_code(config: Config, evidence: Evidence) -> None:
    resources, instructions = without_spills(Program(MODULE, config), 128, evidence)
    size = {"float32": 4}.get(config.pool, 2)
    # of both tiles: a lane's part of the rows, and 16 bytes of q and k each for every 8 of its columns
    state = (config.rows + config.few_rows) * config.K // config.lanes * size // 16
    keys = 2 * 2 * config.K // config.lanes * 2 // 16
    evidence.equal("16-byte loads, less those of states, q and k", instructions.of("LDG", "128") - state - keys, 0)
    evidence.equal("16-byte stores, less those of states", instructions.of("STG", "128") - state, 0)
    outputs = {name: n for name, n in instructions.items() if name.startswith("STG") and ".128" not in name}
    evidence.equal("other stores: an output of each tile", outputs, {"STG.E.U16": 2})
    evidence.equal("barriers", resources.barriers + instructions.of("BAR"), 0)
    evidence.equal("shared memory", resources.static_shared, 0, "B")
    evidence.equal("local memory accesses", instructions.of("LDL") + instructions.of("STL"), 0)


@pytest.mark.criterion("2.12")
def test_sizes_and_pitches_do_not_compile(
    device: torch.device, emulator: None, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of many sizes launch one program; the tile is chosen inside it."""
    launched = watch(monkeypatch)
    border = most_requests_of_the_small_tile()
    sizes = ((1, 3, False), (2, 40, True), (border, border + 2, False), (border + 1, 50, True), (7, 9, True))
    for N, slots, pitched in sizes:
        case = make(N, slots=slots, pitched=pitched, device=device)
        case.run()
        check(case, evidence)
    assert len(launched) == len(sizes)
    evidence.equal("programs for five sizes", len({program.label for program, _ in launched}), 1)


@pytest.mark.criterion("2.12")
@pytest.mark.parametrize("V", (64, 128, 256))
@pytest.mark.parametrize("pool", ("bfloat16", "float16", "float32"))
def test_plan(pool: str, V: int, evidence: Evidence) -> None:
    """Both tiles divide every V; a warp has 4 KiB of state, or 2 KiB while requests are few."""
    config = planned(pool=pool, V=V)
    for rows, bytes_of_a_warp in ((config.rows, 4096), (config.few_rows, 2048)):
        height = config.threads // config.lanes * rows
        evidence.equal("rows beyond the last whole tile", V % height, 0)
        evidence.equal("bytes", height * config.K * {"float32": 4}.get(pool, 2), bytes_of_a_warp)


GIVEN: dict[str, Any] = {"H": 2, "HV": 4, "K": 128, "V": 128, "raw_gates": True, "gate_dtype": "bfloat16"}
SHORT = verify_plan.plan(**GIVEN, bias_dtype="float32", pool="bfloat16", l2norm=True, commit=False, max_tokens=1)
#: one of every program module; `without_spills` asks the same of all that are compiled in any test
PROGRAMS = (
    Program(MODULE, VARIANTS[0]),
    Program(dense.MODULE, dense.VARIANTS[0]),
    Program("kernels.verify.chunk", chunk.VARIANTS[0]),
    Program("kernels.verify.recurrent", lossless.CONFIGS[0]),
    Program("kernels.prepass.program", prepass.CONFIGS[0]),
    SHORT,
    paged_plan(H=2, HV=4, K=128, V=128, pool="bfloat16", gate_dtype="bfloat16", bias_dtype="float32", l2norm=True),
    replay.VARIANTS[0],
    commit.VARIANTS[0],
    ring.VARIANTS[0],
    ring.CURSORS,
)


@pytest.mark.criterion("2.15")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.label)
def test_waits_before_it_reads_and_lets_the_next_one_start(program: Program, evidence: Evidence) -> None:
    cubin = toolchain.cubin(runtime.lower(program).source)
    instructions = toolchain.sass(cubin)
    evidence.equal("waits for the launch before", instructions.of("ACQBULK"), 1)
    evidence.equal("accesses ahead of that wait", toolchain.before_the_wait(cubin), [])
    evidence.at_least("places that let the next launch start", instructions.of("PREEXIT"), 1)


@pytest.mark.criterion("2.15")
def test_every_program_module_is_among_them(evidence: Evidence) -> None:
    root = Path(runtime.__file__).parent
    modules = {
        "kernels." + ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        if re.search(r"^PASS_CONFIGS\b", path.read_text(), re.M)
    }
    evidence.equal("program modules", sorted({program.module for program in PROGRAMS}), sorted(modules))


@pytest.mark.criterion("2.15")
def test_an_access_before_the_wait_is_seen(evidence: Evidence) -> None:
    """Control of the test above: an index that is loaded too early, and a program that never waits."""
    source = runtime.lower(Program(MODULE, VARIANTS[0])).source
    wait = "cudaGridDependencySynchronize();"
    evidence.equal("waits in the source", source.count(wait), 1)
    early = source.replace(wait, f"source = read[blockIdx.x]; {wait}").replace("source = read[(", "source += read[(")
    for changed in (early, source.replace(wait, "")):
        cubin = toolchain.cubin(changed)
        toolchain.sass(cubin)
        evidence.at_least("accesses that are seen ahead of the wait", len(toolchain.before_the_wait(cubin)), 1)


#: (sanitizer, options of the case, whether in the large tile, whether packed)
SANITIZED: tuple[tuple[sanitize.Sanitizer, dict[str, Any], bool, bool], ...] = (
    ("thread", {}, False, False),
    ("thread", {"moves": True}, True, True),
    ("address", {"pitched": True}, True, False),
    ("address", {"moves": True, "pool": torch.float32, "pitched": True}, False, True),
    ("undefined", {"pitched": True}, False, False),
    ("undefined", {"moves": True, "pitched": True}, True, True),
)


@pytest.mark.criterion("2.13")
@pytest.mark.parametrize(("sanitizer", "options", "large", "packed"), SANITIZED, ids=str)
def test_sanitizers(
    sanitizer: sanitize.Sanitizer, options: dict[str, Any], large: bool, packed: bool, evidence: Evidence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing found, with padding below and beyond the pool, and the right results."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runtime, "cpu_launcher", lambda *call: calls.append(call))
    if large:  # a sanitized run of as many requests as that tile is for takes a minute
        monkeypatch.setattr(api, "plan", in_the_large_tile)
    case = make(4, 1, 2, V=64, **options)
    set_slots(case.read, -1, len(case.pool.view))
    if packed:
        case.run_packed()
    else:
        case.run()
    ((program, *args),) = calls
    report = sanitize.run(runtime.lower(program), args, sanitizer)
    assert report.error is None, report.error
    evidence.equal(f"{sanitizer} sanitizer findings", report.findings, [])
    case.pool.storage.copy_(storage_after(report, args, case.pool.view))
    case.o.storage.copy_(storage_after(report, args, case.o.view))
    check(case, evidence)


def in_the_large_tile(**facts: Any) -> Program:
    return Program(MODULE, dataclasses.replace(planned(**facts), few_up_to=0))


def storage_after(report: sanitize.Report, args: list[Any], view: torch.Tensor) -> torch.Tensor:
    """The whole storage of an argument as the sanitized run left it."""
    (at,) = (i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.data_ptr() == view.data_ptr())
    after: torch.Tensor = report.outputs[at]
    size = after.untyped_storage().nbytes() // after.element_size()
    return after.as_strided((size,), (1,), 0)
