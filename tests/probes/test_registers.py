"""Work on register tiles: token loop, layouts, rank-one update, reduction, triangular solve, budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from probes import outer_product, reduce_k, register_budget, row_solve, runtime_loop, state_layout
from tests.gate_engine import Evidence
from tests.probes.conftest import MachineCode
from tests.probes.measure import integers, mismatches, normal, relative_l2

Compile = Callable[..., MachineCode]
Launch = Callable[..., None]


@pytest.mark.criterion("0.3")
def test_runtime_loop(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = runtime_loop.Config()
    program = Program("probes.runtime_loop", config)
    code = machine_code(program)
    evidence.equal("threads per block", int(code.lowered.extents["threadIdx.x"]), config.threads)
    evidence.equal("block barriers", code.instructions.of("BAR"), 0, "instructions")

    lengths = torch.tensor([0, 1, 2, 3, 7, 12, 16, 5], dtype=torch.int32)
    x = integers(16, config.D)
    out = torch.full((len(lengths), config.D), torch.nan, device=device)
    launch(program, x.to(device), lengths.to(device), out)
    want = torch.zeros(len(lengths), config.D, dtype=torch.float64)
    for n, length in enumerate(lengths.tolist()):
        for t in range(length):
            want[n] = want[n] / 2 + x[t].double()
    evidence.equal("wrong elements, lengths 0 to 16", mismatches(out, want), 0)


@pytest.mark.criterion("0.4")
def test_state_layout(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = state_layout.Config()
    program = Program("probes.state_layout", config)
    instructions = machine_code(program).instructions
    elements, wide = config.BV * config.K // config.threads, instructions.of("STG", "128")
    evidence.equal("elements per thread in 16-byte stores, one layout", 4 * wide, elements)
    evidence.equal("elements per thread in single stores, the other", instructions.of("STG") - wide, elements)

    H = 3
    k_major = torch.arange(H * config.K * config.V, dtype=torch.float32).view(H, config.K, config.V)
    v_major = torch.full((H, config.V, config.K), torch.nan, device=device)
    k_major_out = torch.full_like(k_major, torch.nan, device=device)
    launch(program, k_major.to(device), v_major, k_major_out)
    evidence.equal("wrong elements, V-major", mismatches(v_major, k_major.transpose(1, 2)), 0)
    evidence.equal("wrong elements, K-major", mismatches(k_major_out, k_major), 0)


@pytest.mark.criterion("0.6")
def test_outer_product(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = outer_product.Config()
    program = Program("probes.outer_product", config)
    instructions = machine_code(program).instructions
    per_thread = config.BV * config.K // config.threads
    evidence.at_most("FFMA", instructions.of("FFMA"), per_thread, "instructions")
    evidence.equal("tensor-core instructions", instructions.of("HMMA") + instructions.of("HGMMA"), 0)

    decay, u, k = torch.tensor([0.5]), integers(config.BV, seed=1), integers(config.K, seed=2)
    state = integers(config.BV, config.K, seed=3)
    got = state.clone().to(device)
    launch(program, decay.to(device), u.to(device), k.to(device), got)
    evidence.equal("wrong elements", mismatches(got, state / 2 + u[:, None] * k[None, :]), 0)


@pytest.mark.criterion("0.7")
def test_reduce_k(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = reduce_k.Config()
    program = Program("probes.reduce_k", config)
    instructions = machine_code(program).instructions
    evidence.at_least("shuffles", instructions.of("SHFL"), 1, "instructions")
    evidence.equal("block barriers", instructions.of("BAR"), 0, "instructions")
    evidence.equal("shared-memory stores", instructions.of("STS"), 0, "instructions")

    state, x = normal(config.BV, config.K, seed=1), normal(config.K, seed=2)
    out = torch.full((config.BV,), torch.nan, device=device)
    launch(program, state.to(device), x.to(device), out)
    # a product and a sum of K terms in a tree: log2(K) roundings plus the products' own, against fp64
    error = relative_l2(out, state.double() @ x.double())
    evidence.at_most("error against fp64", error, 8 * 2.0**-24, "rel L2")


@pytest.mark.criterion("0.7")
def test_reduce_over_unequal_shares_is_refused(evidence: Evidence) -> None:
    with pytest.raises(Exception, match="no available layout found"):
        lower(Program("probes.reduce_k", reduce_k.Config(K=96)))
    evidence.note("refusal of K = 96", "no available layout found")


@pytest.mark.criterion("0.12")
def test_row_solve(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = row_solve.Config()
    TM = config.TM
    program = Program("probes.row_solve", config)
    instructions = machine_code(program).instructions
    evidence.equal("local-memory instructions", instructions.of("LDL") + instructions.of("STL"), 0)
    evidence.equal("shuffles", instructions.of("SHFL"), 0, "instructions")
    evidence.equal("FFMA", instructions.of("FFMA"), TM * (TM - 1) // 2, "instructions")

    L, r = normal(TM, TM, seed=1).mul(0.25).tril(-1), normal(TM, config.BV, seed=2)
    u = torch.full((TM, config.BV), torch.nan, device=device)
    launch(program, (L + normal(TM, TM, seed=3).triu()).to(device), r.to(device), u)
    system = torch.eye(TM, dtype=torch.float64) + L.double()
    want = torch.linalg.solve_triangular(system, r.double(), upper=False, unitriangular=True)
    # forward substitution is backward stable: at most TM roundings, times how far the system magnifies them
    limit = TM * 2.0**-24 * float(torch.linalg.cond(system))
    evidence.at_most("error against fp64, over its bound", relative_l2(u, want) / limit, 1.0)


@pytest.mark.criterion("0.14")
@pytest.mark.parametrize("BV", [32, 64, 128])
def test_register_budget(
    BV: int, machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence
) -> None:
    config = register_budget.Config(BV)
    program = Program("probes.register_budget", config)
    resources = machine_code(program, f"BV = {BV}").resources
    blocks = 65536 // (-(-resources.registers // 8) * 8 * config.threads)  # allocated in units of 8 per thread
    if BV <= 64:
        evidence.at_least(f"CTAs per SM by registers, BV = {BV}", blocks, 4)
    else:
        evidence.note(f"CTAs per SM by registers, BV = {BV}", blocks)

    TM, K, tokens = config.TM, config.K, 12
    decay = torch.full((TM,), 0.5)
    u, k = integers(TM, BV, low=-2, high=3, seed=1), integers(TM, K, low=-2, high=3, seed=2)
    state = integers(BV, K, seed=3).bfloat16()
    states = torch.full((TM, BV, K), -1.0, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    launch(program, lengths, *(x.to(device) for x in (state, decay, u, k)), states)
    S, want = state.double(), torch.full((TM, BV, K), -1.0, dtype=torch.float64)
    for t in range(tokens):
        S = S * decay[t].double() + u[t].double()[:, None] * k[t].double()[None, :]
        want[t] = S
    evidence.equal("wrong elements, 12 of 16 tokens", mismatches(states, want.float().bfloat16()), 0)
