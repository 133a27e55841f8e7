"""What the tests run in a process of its own: SGLang's loader, its dispatcher, and calls as its backend makes them.

Prints one JSON object. Arguments: "flag", "variable" or "nothing", how the kernels are chosen.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from reference.pool import verify_gated_fwd
from tests.integration.sglang import stubs

N, T, H, HV, K, V, SLOTS = 4, 5, 2, 6, 32, 16, 7
ENTRY = "[sglang.srt.plugins]\nhopper_gdn = integration.sglang:register\n"


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def place(x: torch.Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def recorded(name: str) -> list[Any]:
    """The list that the arguments of the next call of this public function go to."""
    module: Any = importlib.import_module("integration.sglang.kernel")
    public, seen = getattr(module, name), []  # type: ignore[var-annotated]

    def call(*args: Any, **named: Any) -> Any:
        seen.extend(args)
        return public(*args, **named)

    setattr(module, name, call)
    return seen


def refused(build: Any, kind: Any) -> list[str]:
    """What the dispatcher says of backends that SGLang refuses for GDN, where decode and where prefill names one."""
    texts = []
    for backends in (("helion", "triton"), ("triton", "helion"), ("custom", "triton"), ("triton", "custom")):
        try:
            build(*map(kind, backends), kind("triton"))
        except ValueError as error:
            texts.append(str(error))
    return texts


def calls(dispatcher: Any, wrong: str) -> dict[str, Any]:
    """A verify and a packed decode with tensors as GDNAttnBackend has them: views of one row, padding, duplicates."""
    row = 2 * H * K + HV * V
    mixed = torch.randn(N * T, row).bfloat16()
    q, k, v = torch.split(mixed, [H * K, H * K, HV * V], dim=-1)
    q, k, v = q.view(1, N * T, H, K), k.view(1, N * T, H, K), v.view(1, N * T, HV, V)
    a, b = torch.randn(N * T, HV).bfloat16(), torch.randn(N * T, HV).bfloat16()
    A_log, bias = torch.randn(HV), torch.randn(HV).bfloat16()
    pool = torch.randn(SLOTS, HV, V, K).bfloat16()
    indices = torch.tensor([3, -1, 3, 5], dtype=torch.int32)
    starts = torch.arange(0, N * T + 1, T, dtype=torch.int32)
    mixed[T : 2 * T] = float("nan")  # of the padded request
    buffer = torch.full((SLOTS + 1, T, HV, V, K), float("nan")).bfloat16()
    rows = torch.arange(SLOTS, dtype=torch.int32)
    before = pool.clone()
    want, states = torch.zeros(N * T, HV, V, dtype=torch.float64), torch.zeros(buffer.shape, dtype=torch.float64)
    verify_gated_fwd(
        q[0].double(), k[0].double(), v[0].double(), a.double(), b.double(), A_log.double(), bias.double(),
        pool.double(), indices, starts, want, states, rows[:N], dtype=torch.float64, commit=False,
    )  # fmt: skip
    given = (b, a) if wrong == "gates" else (a, b)
    slots = indices[[2, 1, 3, 0]] if wrong == "slot" else indices  # a live one in every place that has a live one
    seen = recorded("recurrent_gated_delta_rule_verify")
    out = dispatcher.target_verify(
        A_log=A_log, dt_bias=bias, q=q, k=k, v=v, a=given[0], b=given[1], ssm_states=pool, cache_indices=slots,
        query_start_loc=starts, intermediate_states_buffer=buffer, intermediate_state_indices=rows, cache_steps=T,
        retrieve_parent_token=None, stable_rows=False,
    )  # fmt: skip
    passed: tuple[Any, ...] = (A_log, given[0], bias, q, k, v, given[1], pool, slots, starts, buffer, rows)
    moved = sum(place(x) != place(y) for x, y in zip(seen, passed, strict=True))
    live = [0, 2, 3]
    result = {
        "moved": moved,
        "verify": relative(out[0].nan_to_num(9.0), want),
        "states": relative(buffer[live].nan_to_num(9.0), states[live]),
        "padded": int((out[0, T : 2 * T] != 0).sum()),
        "padded states": int((~buffer[1].isnan()).sum()),
        "pool": int((bits(pool) != bits(before)).sum()),
        "strided": dispatcher.target_verify_supports_strided_qkv(None),
    }
    one = torch.tensor([3, -1, 2, 5], dtype=torch.int32)
    tokens = mixed[::T].contiguous()
    want, state = torch.zeros(N, HV, V, dtype=torch.float64), pool.double()
    split = tokens.split([H * K, H * K, HV * V], -1)
    q, k, v = [x.reshape(N, -1, size).double() for x, size in zip(split, (K, K, V), strict=True)]
    verify_gated_fwd(
        q, k, v, a[::T].double(), b[::T].double(), A_log.double(), bias.double(), state, one,
        torch.arange(N + 1, dtype=torch.int32), want, dtype=torch.float64, commit=True,
    )  # fmt: skip
    seen = recorded("packed_recurrent_gated_delta_rule_decode")
    start = pool.clone()
    out = dispatcher.packed_decode(
        tokens, a[::T], b[::T], A_log=A_log, dt_bias=bias, scale=K**-0.5, ssm_states=pool, cache_indices=one,
        num_v_heads=HV, head_v_dim=V, replayssm_d=None, replayssm_write_pos=None,
    )  # fmt: skip
    passed = (tokens, a[::T], b[::T], A_log, bias, pool, one)
    result["moved"] += sum(place(x) != place(y) for x, y in zip(seen, passed, strict=True))
    q, k, v = [x.view(1, N, -1, size) for x, size in zip(split, (K, K, V), strict=True)]
    seen = recorded("recurrent_gated_delta_rule_decode")
    plain = dispatcher.decode(
        q, k, v, a[::T], b[::T], A_log=A_log, dt_bias=bias, ssm_states=start, cache_indices=one,
        query_start_loc=torch.arange(N + 1, dtype=torch.int32),
    )  # fmt: skip
    passed = (A_log, a[::T], bias, q, k, v, b[::T], start, one)
    result["moved"] += sum(place(x) != place(y) for x, y in zip(seen, passed, strict=True))
    return result | {
        "decode": relative(out[0], want),
        "decoded": relative(pool, state),
        "plain decode": relative(plain[0], want),
        "plainly decoded": relative(start, state),
        "shape": list(out.shape),
        "untouched": int((bits(pool[[0, 1, 4, 6]]) != bits(before[[0, 1, 4, 6]])).sum()),
    }


def fallbacks(dispatcher: Any) -> int:
    """Calls that reach the stock kernel, whose methods are stand-ins here, of two like ones for each reason."""
    triton = importlib.import_module("sglang.srt.layers.attention.linear.kernels.gdn_triton").TritonGDNKernel
    reached: list[str] = []
    for name in ("decode", "packed_decode", "target_verify"):
        setattr(triton, name, lambda self, *args, name=name, **named: reached.append(name))
    x = torch.zeros(1, 2, H, K, dtype=torch.float16)
    gate, index, pool = torch.zeros(2, HV), torch.zeros(2, dtype=torch.int32), torch.zeros(SLOTS, HV, V, K)
    common: dict[str, Any] = {
        "ssm_states": pool,
        "cache_indices": index.long(),
        "query_start_loc": torch.arange(3, dtype=torch.int32),
    }
    steps: dict[str, Any] = {
        "intermediate_states_buffer": pool[:, None],
        "intermediate_state_indices": index,
        "cache_steps": 1,
    }
    given = (gate[0], gate[0], x, x, torch.zeros(1, 2, HV, V), gate, gate)
    for _ in range(2):
        dispatcher.decode_kernel.decode(*given[2:], A_log=gate[0], dt_bias=gate[0], **common)
        dispatcher.verify_kernel.target_verify(*given, **common, **steps, retrieve_parent_token=index[None])
        dispatcher.decode_kernel.packed_decode(
            torch.zeros(2, 2 * H * K + HV * V).bfloat16(), gate, gate, replayssm_d=gate, num_v_heads=HV, head_v_dim=V,
            scale=1.0, A_log=gate[0], dt_bias=gate[0], ssm_states=pool, cache_indices=index,
        )  # fmt: skip
    return len(reached)


def announce(folder: str) -> list[str]:
    """Put the entry point on the path, and return the list that our log lines go to."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hopper_gdn").addHandler(handler)
    logging.getLogger("hopper_gdn").setLevel(logging.INFO)
    info = Path(folder) / "hopper_gdn_test-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "entry_points.txt").write_text(ENTRY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hopper-gdn-test\nVersion: 1\n")
    sys.path.append(folder)
    return lines


def main(choice: str, folder: str, wrong: str) -> None:
    lines = announce(folder)
    stubs.importable()
    if choice == "variable":
        os.environ["HOPPER_GDN_SGLANG"] = "1"
    importlib.import_module("sglang.srt.plugins").load_plugins()
    backend = importlib.import_module("sglang.srt.layers.attention.linear.gdn_backend")
    context: Any = importlib.import_module("sglang.srt.runtime_context")
    mamba = types.SimpleNamespace(linear_attn_decode_backend="hopper_gdn", linear_attn_backend="triton")
    context.get_exec = lambda: types.SimpleNamespace(mamba=mamba)
    kind = backend.LinearAttnKernelBackend
    choices = importlib.import_module("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    dispatcher = backend.GDNKernelDispatcher(
        kind("hopper_gdn" if choice == "flag" else "triton"), kind("triton"), kind("triton")
    )
    names = ("decode_kernel", "verify_kernel", "extend_kernel", "tree_verify_kernel")
    result: dict[str, Any] = {name: type(getattr(dispatcher, name)).__name__ for name in names}
    result |= {"choices": choices.count("hopper_gdn"), "packed": dispatcher.supports_packed_decode is True}
    mamba.linear_attn_decode_backend = "triton"  # the flag would make CUSTOM ours
    result["refused"] = refused(backend.GDNKernelDispatcher, kind)
    if choice != "nothing":
        result |= calls(dispatcher, wrong)
        result["reached"] = fallbacks(dispatcher)
    print("RESULT" + json.dumps(result | {"lines": lines}))


if __name__ == "__main__":
    main(*sys.argv[1:])
