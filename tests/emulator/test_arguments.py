"""Arguments that do not fit a program, and programs that cannot be emulated, are refused with the reason."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.runtime import Program, lower
from tests.emulator import EmulatorError, build, load
from tests.emulator.arguments import Expression
from tests.emulator.programs import staged, strided
from tests.emulator.programs.edit import replace


def arguments() -> dict[str, Any]:
    return {
        "x": torch.zeros(10, 64).half(),
        "offsets": torch.tensor([0, 1, 4, 9], dtype=torch.int32),
        "factor": 1.0,
        "shift": 0,
        "y": torch.zeros(3, 64).half(),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, r"offsets\.shape\[0\] must be N \+ 1 = 4, is 3"),
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, "offsets must have dtype torch.int32, has torch.int64"),
        ({"x": torch.zeros(10, 63).half()}, r"x\.shape\[1\] must be 64 = 64, is 63"),
        ({"x": torch.zeros(10, 128).half()[:, ::2]}, r"x\.stride\(1\) must be 1 = 1, is 2"),
        ({"x": torch.zeros(640).half()}, r"x must have 2 dimensions, has shape \(640,\)"),
        ({"y": torch.zeros(3, 128).half()[:, :64]}, r"y\.stride\(0\) must be 64 = 64, is 128"),
        ({"y": None}, "y must be a CPU tensor, is a NoneType"),
        (
            {"y": torch.zeros(0, 64).half(), "offsets": torch.zeros(1, dtype=torch.int32)},
            r"the extent N = 0 of blockIdx\.x is not between",
        ),
    ],
    ids=["N + 1", "dtype", "size", "stride of a strided tensor", "rank", "stride", "none", "empty grid"],
)
def test_mismatch(change: dict[str, Any], message: str) -> None:
    kernel = load(lower(Program(strided.__name__, strided.Config())))
    with pytest.raises(EmulatorError, match=message):
        kernel(*{**arguments(), **change}.values())


def test_number_of_arguments() -> None:
    kernel = load(lower(Program(strided.__name__, strided.Config())))
    with pytest.raises(EmulatorError, match="got 1 arguments, expected 5: x, offsets, factor, shift, y"):
        kernel(torch.zeros(10, 64).half())


@pytest.mark.parametrize(
    ("text", "value"),
    [("(N + 4 - 1) // 4", 3), ("T.min(N, 4) * 2", 8), ("M % 8", None), ('T.Cast("int64", N) + T.int64(1)', 11)],
)
def test_expression(text: str, value: int | None) -> None:
    assert Expression(text)({"N": 10}) == value


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "tl::tma_load(desc, bar, p, 0, 0);",
            r"line \d+ .* tl::tma_load: not emulated .TMA; build with TL_DISABLE_TMA",
        ),
        ("tl::tma_store_add(p, q, 16);", "tl::tma_store_add: not emulated"),
        ("const CUtensorMap map;", "CUtensorMap: not emulated"),
        ("tl::mbarrier_wait(bar, 0);", "tl::mbarrier_wait: not emulated"),
        ("tl::cluster_sync();", "tl::cluster_sync: not emulated"),
        ("tl::unheard_of(1);", "uses unheard_of, which is not emulated"),
    ],
)
def test_unsupported_intrinsic(statement: str, message: str) -> None:
    lowered = lower(Program(staged.__name__, staged.Config()))
    with pytest.raises(EmulatorError, match=message):
        load(lowered, patch=replace(r"__syncthreads\(\);", statement))


def test_build_is_reused() -> None:
    lowered = lower(Program(staged.__name__, staged.Config()))
    shared_object = load(lowered).shared_object
    written = shared_object.stat().st_mtime_ns
    assert load(lowered).shared_object == shared_object
    assert shared_object.stat().st_mtime_ns == written


def test_two_builders_of_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both build, one wins, both use the winner's complete directory."""
    monkeypatch.setattr(build, "CACHE", tmp_path)
    meet = threading.Barrier(2)

    def fill(directory: Path) -> None:
        (directory / "product").write_text(directory.name)
        meet.wait(timeout=30)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.once("key", fill), range(2))
    assert first == second == tmp_path / "key"
    assert [p.name for p in tmp_path.iterdir()] == ["key"]
    assert [p.name for p in first.iterdir()] == ["product"]
