"""The programs that warmup and the wheel make ready are those that the public functions launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import decode, replay, runtime, served, verify
from tests.gate_engine import Evidence

N, K, V, SLOTS = 3, 128, 128, 4


def calls(H: int, HV: int, T: int, pool: torch.dtype, bias: torch.dtype) -> dict[str, Callable[[], None]]:
    """Calls as engines make them, T tokens for each of N requests; decode for T = 1 only."""

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    NT = N * T
    slots = torch.arange(N, dtype=torch.int32)
    starts = torch.arange(0, NT + 1, T, dtype=torch.int32)
    states = some(SLOTS, HV, V, K, dtype=pool)
    gates: dict[str, Any] = {"A_log": some(HV, dtype=torch.float32), "a": some(NT, HV), "dt_bias": some(HV, dtype=bias)}
    gates["b"] = some(NT, HV)
    tokens: dict[str, Any] = {"k": some(1, NT, H, K), "v": some(1, NT, HV, V)}
    window = replay.ring.Window.allocate(states, H)
    paging: dict[str, Any] = {"cache_indices": slots, "query_start_loc": starts}
    buffer = some(N, T, HV, V, K, dtype=pool)
    table = torch.zeros(N, max(T, 1), dtype=torch.int32)

    q = some(1, NT, H, K)
    common: dict[str, Any] = {**gates, **tokens, "ssm_states": states}

    def with_snapshots() -> None:
        verify.recurrent_gated_delta_rule_verify(
            **common, q=q, **paging, intermediate_states_buffer=buffer, intermediate_state_indices=slots
        )

    def with_slots() -> None:
        verify.paged_recurrent_gated_delta_rule_verify(
            **common, q=q, slot_table=table, accepted_lengths=slots, query_start_loc=starts
        )

    def replayed() -> None:
        replay.verify(**common, q=q, **paging)
        replay.commit(**common, **paging, accepted_lengths=slots)

    def behind_a_ring() -> None:
        replay.ring.verify(**common, q=q, **paging, window=window)
        replay.ring.accept(window, slots, slots)
        replay.ring.flush(gates["A_log"], gates["dt_bias"], states, slots, window)

    def decoded() -> None:
        rows = {name: x[0] for name, x in (*tokens.items(), ("q", q))}
        mixed = some(N, 2 * H * K + HV * V)
        decode.recurrent_gated_delta_rule_decode(**gates, **rows, ssm_states=states, cache_indices=slots)
        decode.packed_recurrent_gated_delta_rule_decode(mixed, **gates, ssm_states=states, cache_indices=slots)

    found = {"verify": with_snapshots, "paged": with_slots, "replay": replayed, "ring": behind_a_ring}
    return found | {"decode": decoded} if T == 1 else found


@pytest.mark.criterion("8.33")
@pytest.mark.parametrize("bias", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=str)
def test_engines_launch_what_is_made_ready(
    pool: torch.dtype, bias: torch.dtype, monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    H, HV = 4, 12
    launched: dict[str, set[runtime.Program]] = {}
    for T in (1, 2, 3, 12, 16):
        for operation, call in calls(H, HV, T, pool, bias).items():
            seen = launched.setdefault(operation, set())
            monkeypatch.setattr(runtime, "cpu_launcher", lambda program, *_, seen=seen: seen.add(program))
            call()
    dtypes = {"pool": str(pool).removeprefix("torch."), "bias_dtype": str(bias).removeprefix("torch.")}
    for operation in served.OPERATIONS:
        ready = served.programs(H, HV, K=K, V=V, **dtypes, operations=[operation])
        assert launched[operation] == set(ready), operation
        evidence.equal(f"programs of {operation}", len(launched[operation]), len(ready))


@pytest.mark.criterion("8.33")
def test_the_wheel_carries_every_shard_of_every_model(evidence: Evidence) -> None:
    carried = set(served.in_the_wheel())
    evidence.equal("programs in the wheel", len(carried), len(served.in_the_wheel()))
    for H, HV in ((16, 32), (8, 16), (4, 8), (2, 4), (16, 48), (2, 6), (16, 64), (2, 8)):
        for pool in ("bfloat16", "float32"):
            for operation in ("decode", "verify", "paged", "replay"):
                assert carried >= set(served.programs(H, HV, pool=pool, operations=[operation])), (H, HV, operation)


@pytest.mark.criterion("8.33")
def test_warmup_makes_all_of_them_ready(monkeypatch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    ready: list[runtime.Program] = []
    monkeypatch.setattr(runtime, "executable", ready.append)
    count = runtime.warmup(2, 6, pool=torch.float32, bias_dtype=torch.float32)
    assert ready == served.programs(2, 6, pool="float32", bias_dtype="float32")
    evidence.equal("programs", count, len(ready))
    ready.clear()
    assert runtime.warmup(2, 6, operations=["decode"]) == 2 == len(ready)


@pytest.mark.criterion("8.33")
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"operations": ["train"]}, r"'train' must be one of \('decode'"),
        ({"H": 4}, "H is 4 and HV is 6"),
        ({"H": 0}, "H is 0"),
        ({"K": 64}, "K is 64"),
        ({"V": 100}, "V is 100"),
        ({"pool": torch.int8}, "pool is torch.int8"),
    ),
)
def test_warmup_says_what_is_wrong(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: runtime.Program) -> None:
        raise AssertionError("nothing must be compiled")

    monkeypatch.setattr(runtime, "executable", none)
    with pytest.raises(ValueError, match=message):
        runtime.warmup(**{"H": 2, "HV": 6, **arguments})
