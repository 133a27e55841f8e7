"""Heads sharded over two ranks, each a process of its own with half the key heads and their value heads."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kernels.decode
import kernels.replay
import kernels.verify
from kernels import runtime
from tests.gate_engine import Evidence
from tests.launch import emulate

RANKS = 2
REORDERED = 1e-4  # elements that round to the other neighbour in bf16 now and then; a wrong head is of order 1
H, HV, K, V = 2, 4, 128, 128
LENGTHS = (5, 12, 3)
HIDDEN = 96
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's tensors for a call. `sharded` gives those of a rank: heads are sharded, requests are not."""

    tokens: dict[str, Tensor]  # of every draft token
    last: dict[str, Tensor]  # of one token a request, for decode
    gates: dict[str, Tensor]
    pool: Tensor
    out: Tensor  # [HIDDEN, HV, V], the output projection
    slots: Tensor
    starts: Tensor
    accepted: Tensor

    def to(self, device: torch.device) -> Layer:
        def moved(value: Any) -> Any:
            return {name: x.to(device) for name, x in value.items()} if isinstance(value, dict) else value.to(device)

        return Layer(*(moved(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def sharded(self, rank: int) -> Layer:
        def heads(x: Tensor, dim: int) -> Tensor:
            return x.chunk(RANKS, dim)[rank]  # a view: no rank copies anything

        return dataclasses.replace(
            self,
            tokens={name: heads(x, 1) for name, x in self.tokens.items()},
            last={name: heads(x, 1) for name, x in self.last.items()},
            gates={name: heads(x, 0) for name, x in self.gates.items()},
            pool=heads(self.pool, 1).clone(),  # of its own, as on a device of its own
            out=heads(self.out, 1),
        )


def layer() -> Layer:
    generator = torch.Generator().manual_seed(9)

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    N, NT = len(LENGTHS), sum(LENGTHS)
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def tokens(count: int) -> dict[str, Tensor]:
        return {
            "q": rand(count, H, K), "k": rand(count, H, K), "v": rand(count, HV, V), "a": rand(count, HV),
            "b": rand(count, HV),
        }  # fmt: skip

    return Layer(
        tokens=tokens(NT),
        last=tokens(N),
        gates={"A_log": rand(HV, dtype=torch.float32), "dt_bias": rand(HV, dtype=torch.float32)},
        pool=rand(N + 2, HV, V, K),
        out=rand(HIDDEN, HV, V, dtype=torch.float32),
        slots=torch.tensor([3, 1, 4], dtype=torch.int32),
        starts=starts,
        accepted=torch.tensor([2, 12, 0], dtype=torch.int32),
    )


def step(x: Layer) -> dict[str, Tensor]:
    """Verify with snapshots, verify by replay, commit, decode, on the heads that are here; and the projected output."""
    HV_here = x.pool.shape[1]
    snapshots = x.pool.new_zeros(len(LENGTHS), max(LENGTHS), HV_here, V, K)
    rows = torch.arange(len(LENGTHS), dtype=torch.int32, device=x.pool.device)
    requests: dict[str, Any] = {**x.gates, "cache_indices": x.slots}
    verify: dict[str, Any] = {**requests, **x.tokens, "ssm_states": x.pool, "query_start_loc": x.starts}
    token: dict[str, Any] = {**requests, **x.last}
    verified = kernels.verify.recurrent_gated_delta_rule_verify(
        **verify, intermediate_states_buffer=snapshots, intermediate_state_indices=rows
    )
    replayed = kernels.replay.verify(**verify)
    committed = x.pool.clone()
    commit = {name: value for name, value in verify.items() if name != "q"}
    kernels.replay.commit(**{**commit, "ssm_states": committed}, accepted_lengths=x.accepted)
    decoded_pool = committed.clone()
    decoded = kernels.decode.recurrent_gated_delta_rule_decode(**token, ssm_states=decoded_pool)
    projected = torch.einsum("nhv,ohv->no", verified.float(), x.out)
    return {
        "verify": verified, "snapshots": snapshots, "replay": replayed, "commit": committed, "decode": decoded,
        "pool": decoded_pool, "projected": projected,
    }  # fmt: skip


#: dimension of the value heads in each result
HEADS = {"verify": 1, "snapshots": 2, "replay": 1, "commit": 1, "decode": 1, "pool": 1}


def rank(number: int, port: int, folder: str, device: str, emulated: bool) -> None:
    """A rank: the same seed everywhere, its own heads; rank 0 saves what was gathered."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if emulated:
        runtime.cpu_launcher = emulate
        runtime.lowered_cache = ROOT / ".cache" / "lowered"
    if device == "cuda":
        torch.cuda.set_device(number)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=number, world_size=RANKS, timeout=datetime.timedelta(seconds=300))
    try:
        result = step(layer().to(torch.device(device)).sharded(number))
        dist.all_reduce(result["projected"])
        whole = {"projected": result["projected"].cpu()}
        for name, dim in HEADS.items():
            parts = [torch.empty_like(result[name].contiguous()) for _ in range(RANKS)]
            dist.all_gather(parts, result[name].contiguous())
            whole[name] = torch.cat(parts, dim).cpu()
        if number == 0:
            torch.save(whole, os.path.join(folder, "whole.pt"))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    yield port


def compare(folder: str, device: str, emulated: bool, evidence: Evidence) -> None:
    with free_port() as port:
        torch.multiprocessing.spawn(rank, (port, folder, device, emulated), nprocs=RANKS)
    alone = {name: x.cpu() for name, x in step(layer().to(torch.device(device))).items()}
    gathered = torch.load(os.path.join(folder, "whole.pt"))
    for name in HEADS:
        assert alone[name].any()
        if device == "cuda" or emulated:
            evidence.equal(f"{name}: elements with other bits", int((alone[name] != gathered[name]).sum()), 0)
        else:  # a CPU's matrix product may sum in another order where there are fewer heads
            error = (alone[name].double() - gathered[name].double()).norm() / alone[name].double().norm()
            evidence.at_most(f"{name}: relative L2 difference", float(error), REORDERED)
    difference = (alone["projected"] - gathered["projected"]).norm() / alone["projected"].norm()
    evidence.at_most("output projection, summed over ranks: relative L2 difference", float(difference), 1e-6)


@pytest.mark.criterion("6.32")
def test_two_ranks_on_the_reference(tmp_path: Any, evidence: Evidence) -> None:
    compare(str(tmp_path), "cpu", False, evidence)


@pytest.mark.criterion("6.32")
def test_two_ranks_on_the_emulator(tmp_path: Any, emulator: None, machine: str, evidence: Evidence) -> None:
    if machine != "cpu":
        pytest.skip("the emulator stands for a GPU where there is none")
    compare(str(tmp_path), "cpu", True, evidence)


@pytest.mark.criterion("6.32")
def test_a_rank_with_the_wrong_heads_is_seen() -> None:
    """A negative control: shards in another order differ from one rank."""
    x = layer()
    alone, other = step(x), step(x.sharded(1))
    assert not torch.equal(alone["verify"][:, : HV // RANKS], other["verify"])


@pytest.mark.criterion("6.33")
def test_two_gpus(tmp_path: Any, evidence: Evidence) -> None:
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, and {torch.cuda.device_count()} are here")
    compare(str(tmp_path), "cuda", False, evidence)
