"""What successive calls of one token each leave behind: the decode that a lossless verify has to equal bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels import verify
from tests.verify.cases import GUARD, Case


@dataclasses.dataclass
class OneToken:
    """Results of as many committing calls as the longest request has tokens, all requests side by side."""

    o: Tensor  # [NT, HV, V]
    states: list[Tensor]  # per request [tokens, HV, V, K]
    pool: Tensor  # after the last call


def one_token_calls(case: Case) -> OneToken:
    """Feed the inputs of `case` to lossless calls of one token, from the pool as `case` was made."""
    slots = case.pool.before.as_strided(case.pool.view.shape, case.pool.view.stride(), GUARD).clone()
    o = torch.zeros_like(case.o.view)
    states: list[list[Tensor]] = [[] for _ in case.lengths]
    options = dict(case.options)
    raw = options.pop("fuse_gating", True)
    options["disable_state_update"] = False
    gates = None if raw else host_gates(case)
    for t in range(max(case.lengths, default=0)):
        active = [n for n, length in enumerate(case.lengths) if length > t]
        n = torch.tensor(active, device=o.device)
        index = case.cu_seqlens[n].long() + t
        o_t = torch.full_like(o[index], torch.nan)
        after = slots.new_full((len(active), 1, *slots.shape[1:]), torch.nan)
        one_call(case, index, gates, slots, case.state_indices[n], o_t, after, options)
        o[index] = o_t
        for i, request in enumerate(active):
            states[request].append(after[i, 0])
    empty = slots.new_empty(0, *slots.shape[1:])
    return OneToken(o, [torch.stack(x) if x else empty for x in states], slots)


def host_gates(case: Case) -> tuple[Tensor, Tensor]:
    """The gates of all tokens, as the public function computes them with fuse_gating=False."""
    neg_eigval = case.options.get("allow_neg_eigval", False)
    return verify.gdn_sigmoid_gate(case.A_log, case.a, case.dt_bias, case.b, neg_eigval)


def one_call(
    case: Case, index: Tensor, gates: tuple[Tensor, Tensor] | None, slots: Tensor, state_indices: Tensor,
    o: Tensor, after: Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    """The tokens `index`, one of each request."""
    vectors = (case.q[index], case.k[index], case.v[index])
    rows = torch.arange(len(index) + 1, dtype=torch.int32, device=index.device)
    buffers = (slots, state_indices, rows, o, after, rows)
    if gates is None:
        raw = (case.a[index], case.b[index], case.A_log, case.dt_bias)
        verify.fused_recurrent_gdr_verify_gated_fwd(*vectors, *raw, *buffers, **options)
    else:
        options = {name: value for name, value in options.items() if name != "allow_neg_eigval"}
        g, beta = gates
        verify.fused_recurrent_gdr_verify_fwd(*vectors, g[index], beta[index], *buffers, **options)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def different(x: Tensor, y: Tensor) -> int:
    """Elements whose bits differ."""
    return int((bits(x) != bits(y)).sum())


def differences(case: Case, want: OneToken) -> dict[str, int]:
    """What `case.run()` left, against `want`: elements that differ in their bits."""
    covered = int(case.cu_seqlens[-1])
    slots = range(len(case.pool.view))
    live = [n for n, slot in enumerate(case.state_indices.tolist()) if slot in slots]
    snapshots = sum(
        different(case.states.view[case.rows[n], : case.lengths[n]], want.states[n])
        for n in live
        if 0 <= case.rows[n] < len(case.states.view)
    )
    found = {"o": different(case.o.view[:covered], want.o[:covered]), "snapshots": snapshots}
    if not case.options.get("disable_state_update", True):
        found["pool"] = different(case.pool.view, want.pool)
    return found
