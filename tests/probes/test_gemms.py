"""Tensor-core products: what TileLang refuses, what it emits, and how exact it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.runtime import Program, lower
from probes import gemm_shapes, gram, split_state, state_gemm
from tests.gate_engine import Evidence
from tests.probes.conftest import MachineCode
from tests.probes.measure import FP32_SUM, integers, mismatches, normal, relative_l2

Compile = Callable[..., MachineCode]
Launch = Callable[..., None]


def shape(M: int, N: int, transpose_B: bool = True, threads: int = 128) -> Program:
    return Program("probes.gemm_shapes", gemm_shapes.Config(M, N, transpose_B=transpose_B, threads=threads))


@pytest.mark.criterion("0.1")
def test_one_row_is_refused(evidence: Evidence) -> None:
    with pytest.raises(Exception, match="M must be divisible by 16, but got 1") as refusal:
        lower(shape(1, 32))
    evidence.note("refusal of M = 1", str(refusal.value).strip().splitlines()[0])


@pytest.mark.criterion("0.1")
def test_sixteen_rows_are_not(machine_code: Compile, evidence: Evidence) -> None:
    code = machine_code(shape(16, 32), "M = 16")
    evidence.at_least("HMMA, M = 16", code.instructions.of("HMMA"), 1, "instructions")


REFUSED = {
    "row-major B, N = 8": (shape(64, 8, transpose_B=False), "only row-major operand layouts are supported"),
    "row-major B, N = 24": (shape(64, 24, transpose_B=False), "Not a canonical GMMA_MN layout"),
    "16 x 8 on four warps": (shape(16, 8), "cannot be evenly covered by 4 warps"),
    "16 x 32 on eight warps": (shape(16, 32, threads=256), "cannot be evenly covered by 8 warps"),
}
ALLOWED = {
    "row-major B, N = 16": shape(64, 16, transpose_B=False),
    "transposed B, N = 8": shape(64, 8),
    "transposed B, N = 24": shape(64, 24),
}


@pytest.mark.criterion("0.2")
@pytest.mark.parametrize("case", REFUSED)
def test_other_tiles_are_refused(case: str, evidence: Evidence) -> None:
    program, text = REFUSED[case]
    with pytest.raises(Exception, match=text):
        lower(program)
    evidence.note(f"refusal of {case}", text)


@pytest.mark.criterion("0.2")
@pytest.mark.parametrize("case", ALLOWED)
def test_their_neighbours_are_not(case: str, evidence: Evidence) -> None:
    evidence.at_least(f"wgmma, {case}", lower(ALLOWED[case]).source.count("tl::wgmma_ss<"), 1, "calls")


@pytest.mark.criterion("0.8")
@pytest.mark.parametrize("BV", [64, 128])
def test_state_product(
    BV: int, machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence
) -> None:
    config = state_gemm.Config(BV)
    program = Program("probes.state_gemm", config)
    instructions = machine_code(program, f"BV = {BV}").instructions
    wanted = BV // 64 * config.K // 16
    evidence.equal(f"HGMMA 64x32x16, BV = {BV}", instructions.of("HGMMA", "64x32x16"), wanted, "instructions")
    evidence.equal(f"HMMA, BV = {BV}", instructions.of("HMMA"), 0, "instructions")

    def product(S: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        Y = torch.full((BV, config.N), torch.nan, device=device)
        launch(program, S.to(device), X.to(device), Y)
        return Y.cpu()

    S, X = integers(BV, config.K, seed=1).bfloat16(), integers(config.N, config.K, seed=2).bfloat16()
    evidence.equal("wrong elements, whole numbers", mismatches(product(S, X), S.double() @ X.double().T), 0)
    S, X = normal(BV, config.K, seed=3).bfloat16(), normal(config.N, config.K, seed=4).bfloat16()
    error = relative_l2(product(S, X), S.double() @ X.double().T)
    evidence.at_most("error of Y against fp64", error, FP32_SUM, "rel L2")


def split_product(
    program: Program, launch: Launch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state, its parts, the product and the product in fp64."""
    c = program.config
    S = normal(c.BV, c.K, seed=5).mul(torch.logspace(-3, 3, c.K)).to(getattr(torch, c.dtype))
    X = normal(c.N, c.K, seed=6).bfloat16()
    parts = torch.full((c.parts, c.BV, c.K), torch.nan, dtype=torch.bfloat16, device=device)
    Y = torch.full((c.BV, c.N), torch.nan, device=device)
    launch(program, S.to(device), X.to(device), parts, Y)
    return S, parts.cpu(), Y.cpu(), S.double() @ X.double().T


@pytest.mark.criterion("0.9")
@pytest.mark.parametrize(("dtype", "parts"), [("float32", 3), ("float16", 2)])
def test_split_state(
    dtype: str, parts: int, machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence
) -> None:
    program = Program("probes.split_state", split_state.Config(dtype, parts))
    case = f"{dtype} in {parts}"
    instructions = machine_code(program, case).instructions
    evidence.equal(f"HGMMA, {case}", instructions.of("HGMMA"), parts * program.config.K // 16, "instructions")
    S, found, Y, want = split_product(program, launch, device)
    evidence.equal(f"elements not restored, {case}", mismatches(found.double().sum(0), S.double()), 0)
    evidence.at_most(f"error of Y against fp64, {case}", relative_l2(Y, want), parts * FP32_SUM, "rel L2")


@pytest.mark.criterion("0.9")
def test_one_part_is_not_enough(launch: Launch, device: torch.device, evidence: Evidence) -> None:
    """The measure sees the difference: one bf16 part of an fp32 state has bf16's error."""
    program = Program("probes.split_state", split_state.Config("float32", 1))
    _, _, Y, want = split_product(program, launch, device)
    evidence.at_least("error of Y against fp64, float32 in 1", relative_l2(Y, want), 2.0**-10, "rel L2")


@pytest.mark.criterion("0.10")
def test_gram(machine_code: Compile, launch: Launch, device: torch.device, evidence: Evidence) -> None:
    config = gram.Config()
    program = Program("probes.gram", config)
    instructions = machine_code(program).instructions
    evidence.at_least("HMMA 16x8x16", instructions.of("HMMA", "16816"), 1, "instructions")
    evidence.equal("HGMMA", instructions.of("HGMMA"), 0, "instructions")
    for case, X in (
        ("whole numbers", integers(config.R, config.K, seed=7).bfloat16()),
        ("normal", normal(config.R, config.K, seed=8).bfloat16()),
    ):
        G = torch.full((config.R, config.R), torch.nan, device=device)
        launch(program, X.to(device), G)
        want = X.double() @ X.double().T
        if case == "whole numbers":
            evidence.equal("wrong elements, whole numbers", mismatches(G, want), 0)
        else:
            evidence.at_most("error of G against fp64", relative_l2(G, want), FP32_SUM, "rel L2")
