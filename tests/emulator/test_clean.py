"""Correct programs give the exact result and no sanitizer finding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import load, sanitize
from tests.emulator.arguments import TensorParameter
from tests.emulator.programs import blocks, bulk, casts, fragments, gemm, pool, reductions, staged, strided

pytestmark = pytest.mark.criterion("0.20")


def run(module: Any, config: Any, *args: Any) -> None:
    load(lower(Program(module.__name__, config)))(*args)


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16, limit: int = 8, seed: int = 0) -> torch.Tensor:
    """Small integers: their products and sums are exact in float32, so that results must be equal, not close."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "config",
    [
        gemm.Config(64, 32, 128),
        gemm.Config(128, 32, 128),
        gemm.Config(64, 16, 64, dtype="float16"),
        gemm.Config(64, 32, 128, a_in_registers=True),
        gemm.Config(64, 32, 128, parts=2),
        gemm.Config(64, 32, 128, b_transposed=False),
        gemm.Config(32, 32, 128),
        gemm.Config(32, 32, 64, dtype="float16"),
    ],
    ids=str,
)
def test_gemm(config: gemm.Config, evidence: Any) -> None:
    dtype = getattr(torch, config.dtype)
    a, b = integers(config.M, config.K, dtype=dtype), integers(config.N, config.K, dtype=dtype, seed=1)
    c = torch.full((config.M, config.N), float("nan"))
    run(gemm, config, a, b if config.b_transposed else b.T.contiguous(), c)
    wrong = int((c != a.float() @ b.float().T).sum())
    evidence.equal("wrong elements of integer products", wrong, 0)


def test_fragments_of_one_warp(evidence: Any) -> None:
    a, b, c = integers(16, 64), integers(8, 64, seed=1), torch.full((16, 8), float("nan"))
    run(fragments, fragments.Config(), a, b, c)
    wrong = int((c != a.float() @ b.float().T).sum())
    evidence.equal("wrong elements of integer products", wrong, 0)


@pytest.mark.parametrize("config", [bulk.Config(), bulk.Config(warps=1, rows=1, columns=32)], ids=str)
def test_bulk_stores(config: bulk.Config) -> None:
    x = torch.randn(3, config.warps, config.rows, config.columns)
    y = torch.full_like(x, float("nan"))
    run(bulk, config, x, y)
    assert torch.equal(y, x.flip(3))


def test_conversions() -> None:
    """All 2^16 fp16 values, and fp32 values of all sizes with ties to even, subnormals, overflow and infinity."""
    h = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = h.nan_to_num(1.0).float() * (1 + 2.0**-11)  # half an ulp beyond each fp16 value
    x[:4096] = (torch.randn(4096) * torch.logspace(-38, 38, 4096)).float()
    x[4096:4100] = torch.tensor([65519.0, 65520.0, float("inf"), -0.0])
    half, bf16, wide = torch.empty_like(h), torch.empty_like(h, dtype=torch.bfloat16), torch.empty_like(x)
    run(casts, casts.Config(), x, h, half, bf16, wide)
    assert torch.equal(half, x.half())
    assert torch.equal(bf16, x.bfloat16())
    assert torch.equal(wide.nan_to_num(7.5), h.float().nan_to_num(7.5))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["copy", "cp.async"])
def test_staged_copy(asynchronous: bool) -> None:
    x, y = torch.randn(3, 16, 128).bfloat16(), torch.full((3, 16, 128), float("nan"))
    run(staged, staged.Config(asynchronous=asynchronous), x, y)
    assert torch.equal(y, x.float().flip(1, 2))


def test_reductions() -> None:
    x = integers(8, 128, dtype=torch.float32)
    sums, largest, running = torch.empty(8), torch.empty(1), torch.empty(8, 128)
    run(reductions, reductions.Config(), x, sums, largest, running)
    assert torch.equal(sums, x.sum(1))
    assert torch.equal(largest, x[:1].amax(1))
    assert torch.equal(running, x.cumsum(1))


def test_strided_tensor_and_scalars() -> None:
    storage = torch.randn(10, 3, 64).half()
    x = storage[:, 1]
    offsets = torch.tensor([0, 1, 4, 9], dtype=torch.int32)
    y = torch.full((3, 64), float("nan"), dtype=torch.float16)
    run(strided, strided.Config(), x, offsets, 1.5, 3, y)
    lengths = offsets.diff()[:, None]
    expected = (x[offsets[:3].long()].float() * 1.5).half()
    assert torch.equal(y, torch.where(lengths > 1, expected + 3, expected))


def test_element_offsets_beyond_32_bits() -> None:
    config = pool.Config()
    slots = 2**31 // config.slot_size + 2
    data = torch.empty(slots, config.slot_size, dtype=torch.int8)  # address space only: three pages are touched
    chosen = torch.tensor([0, slots - 1], dtype=torch.int32)
    data[chosen.long(), : config.used] = 5
    data[1, : config.used] = 1
    seen = torch.zeros(2, config.used, dtype=torch.int8)
    run(pool, config, data, chosen, seen)
    assert bool((seen == 5).all())
    assert bool((data[chosen.long(), : config.used] == 7).all())
    assert bool((data[1, : config.used] == 1).all())


@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (Program(gemm.__name__, gemm.Config(64, 32, 128)), [(64, 128), (32, 128), (64, 32)]),
        (Program(gemm.__name__, gemm.Config(32, 32, 128)), [(32, 128), (32, 128), (32, 32)]),
        (Program(staged.__name__, staged.Config(asynchronous=True)), [(3, 16, 128), (3, 16, 128)]),
        (Program(bulk.__name__, bulk.Config()), [(2, 2, 6, 64), (2, 2, 6, 64)]),
        (Program(fragments.__name__, fragments.Config()), [(16, 64), (8, 64), (16, 8)]),
        (Program(reductions.__name__, reductions.Config()), [(8, 128), (8,), (1,), (8, 128)]),
        (Program(blocks.__name__, blocks.Config()), [(4, 32)]),
    ],
    ids=["wgmma", "mma.sync", "cp.async", "bulk store", "fragments", "reductions", "blocks"],
)
def test_no_data_race(program: Program, shapes: list[tuple[int, ...]]) -> None:
    no_finding(program, shapes, "thread")


@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
@pytest.mark.parametrize(
    ("program", "shape"),
    [
        (Program(staged.__name__, staged.Config(asynchronous=True)), (3, 16, 128)),
        (Program(bulk.__name__, bulk.Config()), (2, 2, 6, 64)),
    ],
    ids=["cp.async", "bulk store"],
)
def test_no_bad_access(program: Program, shape: tuple[int, ...], sanitizer: sanitize.Sanitizer) -> None:
    no_finding(program, [shape, shape], sanitizer)


def no_finding(program: Program, shapes: list[tuple[int, ...]], sanitizer: sanitize.Sanitizer) -> None:
    """No false alarm, and the sanitized run computes what the plain run computes."""
    lowered = lower(program)
    kernel = load(lowered)
    dtypes = [p.dtype for p in kernel.signature.parameters if isinstance(p, TensorParameter)]
    args = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    report = sanitize.run(lowered, args, sanitizer)
    assert report.findings == [], report.text
    assert report.error is None
    kernel(*args)
    for plain, sanitized in zip(args, report.outputs, strict=True):
        assert torch.equal(plain, sanitized)
