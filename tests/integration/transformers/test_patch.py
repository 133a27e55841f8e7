"""patch() and unpatch(); the functions and greedy generation against the stock ones, in every supported version."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gate_engine import Evidence
from tests.integration import frameworks
from tests.integration.transformers import cases
from tests.limits import ROUNDING

pytest.importorskip("transformers")

import integration.transformers as adapter

ROOT = Path(__file__).resolve().parents[3]
RECURRENT, CHUNK = adapter.NAMES
#: 5.17 needs httpx and huggingface-hub 1; no test downloads, so that a stand-in and the number suffice
OLD = """
import importlib.metadata as metadata, sys, unittest.mock
sys.modules["httpx"] = unittest.mock.MagicMock()
real = metadata.version
metadata.version = lambda name: "1.5.0" if name == "huggingface-hub" else real(name)
"""
RUN = """
import runpy
runpy.run_module("tests.integration.transformers.cases", run_name="__main__")
"""


def globals_now() -> list[Any]:
    return [getattr(cases.module(name), function) for name in cases.MODELS for function in adapter.NAMES]


def inputs(T: int, H: int, HV: int, K: int = 128, V: int = 128, B: int = 2, dtype: Any = torch.float32) -> list[Any]:
    """q, k, v, g, beta as a layer makes them: channels of one projection, strided by a convolution."""
    mixed = torch.randn(B, 2 * H * K + HV * V, T).to(dtype).transpose(1, 2)
    q, k, v = torch.split(mixed, [H * K, H * K, HV * V], dim=-1)
    gates = (-torch.rand(B, T, HV) * 0.3, torch.rand(B, T, HV).to(dtype))
    return [q.reshape(B, T, H, K), k.reshape(B, T, H, K), v.reshape(B, T, HV, V), *gates]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.criterion("6.10")
def test_patches_nest_and_restore(evidence: Evidence) -> None:
    before = globals_now()
    with adapter.patch():
        inside = globals_now()
        evidence.equal("functions replaced", sum(a is not b for a, b in zip(before, inside, strict=True)), 6)
        with adapter.patch():
            evidence.equal("functions the second patch() replaced", globals_now() == inside, True)
        evidence.equal("still patched after the inner context", globals_now() == inside, True)
    evidence.equal("what was there is back", all(a is b for a, b in zip(globals_now(), before, strict=True)), True)
    with pytest.raises(RuntimeError, match="without a patch"):
        adapter.unpatch()
    with pytest.raises(ZeroDivisionError), adapter.patch():
        raise ZeroDivisionError
    evidence.equal("back after an exception", all(a is b for a, b in zip(globals_now(), before, strict=True)), True)


@pytest.mark.criterion("6.10")
def test_what_others_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module, mine = cases.module("qwen3_next"), lambda *args, **kwargs: None
    monkeypatch.setattr(module, CHUNK, mine)
    with adapter.patch():
        assert getattr(module, CHUNK) is not mine
    assert getattr(module, CHUNK) is mine
    with adapter.patch():
        monkeypatch.setattr(module, CHUNK, test_what_others_put_there_stays)
    assert getattr(module, CHUNK) is test_what_others_put_there_stays


UNSERVED: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "a gradient is asked for": lambda x, options: x[0].requires_grad_(),
    "packed sequences": lambda x, options: options.update(seq_idx=torch.zeros(1)),
    "fp64 inputs": lambda x, options: x.__setitem__(2, x[2].double()),
    "more than": lambda x, options: x.__setitem__(slice(None), inputs(65, 2, 4)),
    "K is": lambda x, options: None,
}


@pytest.mark.criterion("6.10")
@pytest.mark.parametrize("why", UNSERVED)
def test_unserved_calls_run_the_stock_function(
    why: str, evidence: Evidence, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def stand_in(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "stock"

    monkeypatch.setattr(cases.module("qwen3_next"), CHUNK, stand_in)
    tokens, options = inputs(5, 2, 4), {"use_qk_l2norm_in_kernel": True}
    UNSERVED[why](tokens, options)
    if why == "K is":  # what the kernels refuse, they refuse with a reason
        import kernels.decode

        def refuse(*_: Any, **__: Any) -> None:
            raise ValueError("K is 64, must be 128")

        monkeypatch.setattr(kernels.decode, "recurrent_gated_delta_rule", refuse)
    with adapter.patch(), caplog.at_level(logging.INFO, "hopper_gdn"):
        function = getattr(cases.module("qwen3_next"), CHUNK)
        results = [function(*tokens, **options) for _ in range(3)]
    evidence.equal("stock results", results, ["stock"] * 3)
    evidence.equal("arguments handed on", all(a is b for a, b in zip(calls[0][0], tokens, strict=True)), True)
    evidence.equal("options handed on", all(calls[0][1][key] is value for key, value in options.items()), True)
    lines = [record.message for record in caplog.records]
    evidence.equal("lines of three calls that give the reason", sum(why in line for line in lines), 1)
    evidence.equal("lines of three calls", len(lines), 1)


@pytest.mark.criterion("6.11")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("repeated", (False, True), ids=("unrepeated", "repeated"))
@pytest.mark.parametrize("name", cases.MODELS)
def test_functions_equal_stock(name: str, repeated: bool, dtype: torch.dtype, evidence: Evidence) -> None:
    torch.manual_seed(len(name) + repeated)
    for function, T in ((RECURRENT, 1), (CHUNK, 1), (CHUNK, 5), (CHUNK, 64)):
        stock = getattr(cases.module(name), function)
        for initial in (torch.randn(2, 6, 128, 64), None):
            q, k, *others = inputs(T, 2, 6, V=64, dtype=dtype)
            if repeated:
                q, k = (x.repeat_interleave(3, dim=2) for x in (q, k))
            calls = {"initial_state": initial, "use_qk_l2norm_in_kernel": True}
            state_before = None if initial is None else initial.clone()
            for final in (True, False):
                want = stock(q, k, *others, output_final_state=final, **calls)
                with adapter.patch():
                    got = getattr(cases.module(name), function)(q, k, *others, output_final_state=final, **calls)
                    assert any(f"{function} runs kernels" in line for line in adapter._said)
                limit = 1e-5 if dtype is torch.float32 else ROUNDING[dtype]
                assert got[0].dtype is want[0].dtype and got[0].shape == want[0].shape
                evidence.at_most(f"o in {dtype}, relative L2", error(got[0], want[0]), limit)
                if final:
                    assert got[1].dtype is torch.float32
                    evidence.at_most("final state, relative L2", error(got[1], want[1]), 1e-5)
                else:
                    evidence.equal("final states that nobody asked for", int(got[1] is not None), 0)
            if initial is not None and state_before is not None:
                evidence.equal("initial state unchanged", torch.equal(initial, state_before), True)


def check_tokens(result: dict[str, Any], evidence: Evidence) -> None:
    for length, case in result.items():
        evidence.equal(f"prompt of {length}: tokens equal the stock ones", case["ours"] == case["stock"], True)
        evidence.at_least("different tokens in a row", len(set(case["stock"][0])), 5)
        evidence.equal("the kernels ran", any(f"{RECURRENT} runs kernels" in line for line in case["lines"]), True)


@pytest.mark.criterion("6.12")
@pytest.mark.parametrize("name", cases.MODELS)
def test_greedy_tokens_here(name: str, evidence: Evidence) -> None:
    check_tokens(cases.patched_and_stock(name), evidence)


@pytest.mark.criterion("6.12")
@pytest.mark.parametrize("version", ("5.17.0", "5.19.0"))
def test_greedy_tokens_of_other_versions(version: str, evidence: Evidence) -> None:
    try:
        place = frameworks.folder(f"transformers-{version}")
    except frameworks.Absent as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-c", OLD + RUN if version == "5.17.0" else RUN]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.split("RESULT ", 1)[1])
    evidence.equal("version", result.pop("version"), version)
    for name in cases.MODELS:
        check_tokens(result[name], evidence)


@pytest.mark.criterion("6.15")
@pytest.mark.parametrize("mistake", ("transposed state", "missing repeat", "stale state"))
def test_wrong_adapters_are_seen(mistake: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.decode

    right: Any = kernels.decode.recurrent_gated_delta_rule

    def wrong(q: Any, k: Any, *others: Any, initial_state: Any = None, **options: Any) -> Any:
        if mistake == "missing repeat":  # value head h reads key head h % H
            q, k = (torch.cat([x] * (others[0].shape[2] // x.shape[2]), dim=2) for x in (q, k))
        o, state = right(q, k, *others, initial_state=initial_state, **options)
        if mistake == "transposed state":
            state = state.mT.contiguous()
        if mistake == "stale state" and initial_state is not None:
            state = initial_state
        return o, state

    monkeypatch.setattr(kernels.decode, "recurrent_gated_delta_rule", wrong)
    case = cases.patched_and_stock("qwen3_next")["7"]
    evidence.equal("tokens of a wrong adapter equal the stock ones", case["ours"] == case["stock"], False)
