"""One set of fixtures for both machines: programs run on the emulator without a GPU and on the GPU with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels import runtime
from tests import machine as machine_facts
from tests.launch import emulate

pytest_plugins = ["tests.gate_engine", "tests.sampling", "tests.bench.options"]


def pytest_configure(config: pytest.Config) -> None:
    runtime.lowered_cache = config.rootpath / ".cache" / "lowered"
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # one core per worker


@pytest.fixture(scope="session")
def machine() -> str:
    """ "sm90" or "cpu": where programs run in this session."""
    return machine_facts.kind()


@pytest.fixture(scope="session")
def device(machine: str) -> torch.device:
    """Where `launch` and the public API expect their tensors."""
    return torch.device("cuda" if machine == "sm90" else "cpu")


@pytest.fixture
def launch(machine: str) -> Callable[..., None]:
    """Runs a program: launch(program, *args), args in the order of the PrimFunc's parameters."""
    return runtime.launch if machine == "sm90" else emulate


@pytest.fixture
def emulator(machine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under this fixture CPU calls of the public API execute the generated SM90 CUDA. No effect with a GPU."""
    if machine == "cpu":
        monkeypatch.setattr(runtime, "cpu_launcher", emulate)
    yield


@pytest.fixture
def free_memory() -> Iterator[None]:
    """Workers share one GPU: what a test cached is given back."""
    yield
    torch.cuda.empty_cache()
