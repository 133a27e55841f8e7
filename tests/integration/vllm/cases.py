"""Calls as vLLM makes them, and what they mean: a loop over tokens in fp64 that shares no code with the adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from integration.vllm.paged import paged_update

#: relative L2: one rounding to nearest has 1.7e-3 in bf16, the size of an output or of a state in a bf16 pool; an fp32
#: state carries only the fp32 arithmetic of up to 16 steps
ROUNDING = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
#: on the GPU q, k and u pass the tensor cores as sums of bf16 parts
ROUNDING_GPU = {torch.bfloat16: 2.5e-3, torch.float32: 1e-3}
POISON = 77.0  # what slots of nobody hold


@dataclasses.dataclass
class Case:
    """One call. `lengths` are the tokens of the requests, `free` the slots that no request names."""

    arguments: dict[str, Any]
    lengths: tuple[int, ...]
    free: Tensor

    @property
    def pool(self) -> Tensor:
        return self.arguments["initial_state"]


def make(
    lengths: Sequence[int],
    accepted: Sequence[int] | None,
    columns: int = 1,
    *,
    padded: Sequence[int] = (),
    pool: torch.dtype = torch.bfloat16,
    H: int = 2,
    HV: int = 4,
    K: int = 128,
    V: int = 128,
    tail: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Distinct random slots above 0, and null ones for the requests in `padded`, whose inputs are NaN.

    accepted None: one-dimensional indices. `tail` rows behind the last request are NaN too.
    """
    torch.manual_seed(seed)
    N, NT = len(lengths), sum(lengths) + tail
    slots = N * columns + 6
    ids = torch.randperm(slots - 1)[: N * columns].to(torch.int32).view(N, columns) + 1
    ids[list(padded)] = 0
    states = torch.randn(slots, HV, V, K).mul_(0.3).to(pool)
    free = torch.ones(slots, dtype=torch.bool)
    free[ids.flatten().long()] = False
    free[0] = True  # the null block is nobody's
    states[free] = POISON
    rows = {"a": (NT, HV), "b": (NT, HV), "q": (1, NT, H, K), "k": (1, NT, H, K), "v": (1, NT, HV, V)}
    arguments: dict[str, Any] = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in rows.items()}
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    nobody = torch.ones(NT, dtype=torch.bool)
    for n in set(range(N)) - set(padded):
        nobody[starts[n] : starts[n + 1]] = False
    for name, shape in rows.items():
        arguments[name].view(shape[-3:] if len(shape) == 4 else shape)[nobody] = float("nan")
    arguments |= {
        "A_log": torch.rand(HV).mul_(2).log_(),
        "dt_bias": torch.randn(HV).to(torch.bfloat16),
        "initial_state": states,
        "cu_seqlens": starts,
        "ssm_state_indices": ids if accepted is not None else ids[:, 0].contiguous(),
        "use_qk_l2norm_in_kernel": True,
    }
    if accepted is not None:
        arguments["num_accepted_tokens"] = torch.tensor(accepted, dtype=torch.int32)
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return Case(arguments, tuple(lengths), free)


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """o [NT, HV, V] and the pool in fp64, and which slots are written [slots]."""
    x = {name: t.cpu().double() if isinstance(t, Tensor) else t for name, t in case.arguments.items()}
    q, k, v = (x[name][0] for name in ("q", "k", "v"))
    pool, o = x["initial_state"].clone(), torch.zeros_like(v)
    written = torch.zeros(len(pool), dtype=torch.bool)
    group = v.shape[1] // q.shape[1]
    indices = case.arguments["ssm_state_indices"].cpu().long()
    indices = indices if indices.dim() == 2 else indices[:, None]
    accepted = case.arguments.get("num_accepted_tokens")
    start = 0
    for n, length in enumerate(case.lengths):
        column = 0 if accepted is None else min(max(int(accepted[n]) - 1, 0), indices.shape[1] - 1)
        slot = int(indices[n, column])
        if slot > 0:
            S = pool[slot].clone()
            for t in range(length):
                row = start + t
                for h in range(v.shape[1]):
                    qh, kh = q[row, h // group], k[row, h // group]
                    qh = qh / (qh.square().sum() + 1e-6).sqrt() * q.shape[2] ** -0.5
                    kh = kh / (kh.square().sum() + 1e-6).sqrt()
                    gate = -x["A_log"][h].exp() * torch.nn.functional.softplus(x["a"][row, h] + x["dt_bias"][h])
                    S[h] *= gate.exp()
                    u = torch.sigmoid(x["b"][row, h]) * (v[row, h] - S[h] @ kh)
                    S[h] += torch.outer(u, kh)
                    o[row, h] = S[h] @ qh
                if (target := int(indices[n, t])) > 0:
                    pool[target] = S
                    written[target] = True
        start += length
    return o, pool, written


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm().clamp_min(1e-30))


@dataclasses.dataclass
class Errors:
    """How far a call is from its meaning. `o` and `states` are the worst relative L2 of a request and of a slot."""

    o: float
    states: float
    touched: int  # elements that changed in slots that are nobody's, skipped, or not written
    nobody: int  # outputs of skipped requests and of no request that are not zero


def measure(case: Case, update: Callable[..., tuple[Tensor, Tensor]] = paged_update) -> Errors:
    want_o, want_pool, written = expected(case)
    before = case.pool.cpu().clone()
    o, pool = update(**case.arguments)
    assert pool.data_ptr() == case.pool.data_ptr() and o.shape == case.arguments["v"].shape
    return compare(case, o, want_o, want_pool, written, before)


def compare(case: Case, o: Tensor, want_o: Tensor, want_pool: Tensor, written: Tensor, before: Tensor) -> Errors:
    got, pool = o[0].cpu(), case.pool.cpu()
    empty = (want_o == 0).flatten(1).all(1)
    worst_o = [relative_l2(got[row], want_o[row]) for row in (~empty).nonzero().flatten()]
    worst_state = [relative_l2(pool[slot], want_pool[slot]) for slot in written.nonzero().flatten()]
    return Errors(
        max((x if x == x else float("inf") for x in worst_o), default=0.0),
        max((x if x == x else float("inf") for x in worst_state), default=0.0),
        int((pool[~written] != before[~written]).sum()),
        int((got[empty] != 0).sum()),
    )
