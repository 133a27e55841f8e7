"""Global memory: cp.async, offsets past 2^31 elements, run-time pitches, grid axes."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from probes import async_copy, grid_limit, pool_offsets, strided_rows
from tests.gate_engine import Evidence
from tests.probes.conftest import MachineCode
from tests.probes.measure import mismatches, normal

Compile = Callable[..., MachineCode]
Launch = Callable[..., None]

WRAP = 2**31  # elements that a 32-bit offset can be off by
Y_LIMIT = 65535


@pytest.mark.criterion("0.11")
def test_async_copy(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = async_copy.Config()
    program = Program("probes.async_copy", config)
    instructions = machine_code(program).instructions
    wanted = config.BV * config.K * 2 // 16 // config.threads
    evidence.equal("LDGSTS of 16 bytes", instructions.of("LDGSTS", "128"), wanted, "instructions")
    evidence.equal("LDGSTS in all", instructions.of("LDGSTS"), wanted, "instructions")
    evidence.equal("16-byte register loads", instructions.of("LDG", "128"), 0, "instructions")

    pool = normal(5, config.BV, config.K).bfloat16()
    slots = torch.tensor([3, 0, 4], dtype=torch.int32)
    out = torch.full((3, config.BV, config.K), torch.nan, dtype=torch.bfloat16, device=device)
    launch(program, pool.to(device), slots.to(device), out)
    evidence.equal("wrong elements", mismatches(out, pool[slots.long()].flip(1)), 0)


def sparse(elements: int, device: torch.device) -> torch.Tensor:
    """`elements` bf16 zeros; on a CPU of untouched pages that take no memory."""
    if device.type == "cuda":
        return torch.zeros(elements, dtype=torch.bfloat16, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


@pytest.mark.criterion("0.13")
def test_pool_offsets(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = pool_offsets.Config()
    program = Program("probes.pool_offsets", config)
    machine_code(program)
    tile = config.BV * config.K
    pitch = 24 * tile  # the slot's other heads lie between two tiles
    first, last = WRAP // pitch + 1, WRAP // pitch + 40
    # room for WRAP elements in front: a wrapped offset reads zeros and fails the comparison instead of the process
    memory = sparse(WRAP + (last + 1) * pitch, device)
    pool = memory[WRAP:].view(last + 1, pitch)[:, :tile].view(last + 1, config.BV, config.K)
    slots = torch.tensor([first, 1, last], dtype=torch.int32)
    states = normal(3, config.BV, config.K).bfloat16()
    for slot, state in zip(slots.tolist(), states, strict=True):
        pool[slot].copy_(state)
    out = torch.full((3, config.BV, config.K), torch.nan, dtype=torch.bfloat16, device=device)
    launch(program, pool, slots.to(device), out)
    stored = torch.stack([pool[slot] for slot in slots.tolist()])
    evidence.at_least("offset of the first far slot", first * pitch, WRAP, "elements")
    evidence.equal("wrong elements read", mismatches(out, states), 0)
    evidence.equal("wrong elements stored", mismatches(stored, 2 * states.float()), 0)


@pytest.mark.criterion("0.16")
def test_strided_rows(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = strided_rows.Config(aligned=True)
    program = Program("probes.strided_rows", config)
    instructions = machine_code(program, "pitch promised").instructions
    accesses = strided_rows.TM * config.K * 2 // 16 // config.threads
    evidence.equal("16-byte loads, plain and guarded", instructions.of("LDG", "128"), 2 * accesses, "instructions")
    evidence.equal("16-byte LDGSTS", instructions.of("LDGSTS", "128"), accesses, "instructions")
    evidence.equal("2-byte loads, pitch promised", instructions.of("LDG", "U16"), 0, "instructions")

    row = normal(40, 3 * config.H * config.K).bfloat16().to(device)  # one projection row per token: q, k, v
    x = row[:, config.H * config.K : 2 * config.H * config.K].unflatten(1, (config.H, config.K))
    out = torch.full((3, strided_rows.TM, config.K), torch.nan, dtype=torch.bfloat16, device=device)
    launch(program, x, torch.tensor([7], dtype=torch.int32, device=device), out)
    want = x[7 : 7 + strided_rows.TM, 1].expand(3, -1, -1).clone()
    want[1, 13:] = 0
    evidence.equal("wrong elements", mismatches(out, want.cpu()), 0)


@pytest.mark.criterion("0.16")
def test_strided_rows_without_the_promise(machine_code: Compile, evidence: Evidence) -> None:
    narrow = strided_rows.Config(aligned=False, asynchronous=False)
    instructions = machine_code(Program("probes.strided_rows", narrow), "pitch unknown").instructions
    evidence.at_least("2-byte loads, pitch unknown", instructions.of("LDG", "U16"), 1, "instructions")
    evidence.equal("16-byte loads, pitch unknown", instructions.of("LDG", "128"), 0, "instructions")
    with pytest.raises(Exception, match="no eligible global->shared store"):
        lower(Program("probes.strided_rows", strided_rows.Config(aligned=False)))
    evidence.note("refusal of cp.async, pitch unknown", "no eligible global->shared store was rewritten")


def blocks_that_ran(axis: str, blocks: int, launch: Launch, device: torch.device) -> int:
    out = torch.full((blocks,), -1, dtype=torch.int32, device=device)
    launch(Program("probes.grid_limit", grid_limit.Config(axis)), out)
    return int((out.cpu() == torch.arange(blocks, dtype=torch.int32)).sum())


@pytest.mark.criterion("0.15")
def test_grid_x(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    machine_code(Program("probes.grid_limit", grid_limit.Config("x")))
    blocks = Y_LIMIT + 2
    evidence.equal("blocks that ran on x", blocks_that_ran("x", blocks, launch, device), blocks)


@pytest.mark.sm90
@pytest.mark.criterion("0.26")
def test_grid_y(launch: Launch, device: torch.device, evidence: Evidence) -> None:
    evidence.equal("blocks that ran on y", blocks_that_ran("y", Y_LIMIT, launch, device), Y_LIMIT)
    with pytest.raises(Exception, match=r"(?i)cuda|launch"):
        blocks_that_ran("y", Y_LIMIT + 1, launch, device)
        torch.cuda.synchronize()
    evidence.equal("blocks that run on x afterwards", blocks_that_ran("x", 64, launch, device), 64)
