"""Inputs of a paged decode with guarded buffers, its fp64 result, and the comparison between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import reference.pool
from kernels import decode
from kernels.decode.plan import plan
from tests.gate_engine import Evidence
from tests.limits import ROUNDING
from tests.verify.cases import GUARD, Buffer, relative_l2
from tests.verify.one_token import bits

INT_MIN, INT_MAX = -(2**31), 2**31 - 1

#: half a unit in the last place, of the largest value in a binade
HALF_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
INPUTS = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "read", "write")


@dataclasses.dataclass
class DecodeCase:
    """One call of the low-level function: inputs, guarded buffers, options."""

    mixed: Tensor  # the rows that q, k and v are views of
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    pool: Buffer
    read: Tensor
    write: Tensor | None
    o: Buffer
    options: dict[str, Any]

    @property
    def gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.b, self.A_log, self.dt_bias

    def run(self, function: Callable[..., None] = decode.fused_recurrent_gdr_decode_fwd) -> None:
        """Call the low-level function, or one of its signature. The inputs stay as they are."""
        before = [x.clone() for x in self._inputs()]
        function(
            self.q, self.k, self.v, *self.gates, self.pool.view, self.read, self.o.view, self.write, **self.options
        )
        for name, x, old in zip(INPUTS, self._inputs(), before, strict=False):
            assert torch.equal(as_bits(x), as_bits(old)), f"{name} changed"

    def run_packed(self) -> None:
        """Call the function that takes the mixed rows."""
        decode.packed_recurrent_gated_delta_rule_decode(
            self.mixed, *self.gates, self.pool.view, self.read, self.o.view, write_indices=self.write, **self.options
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """o and the pool in fp64, not rounded; from the pool as it was made."""
        pool = self.pool.before.as_strided(self.pool.view.shape, self.pool.view.stride(), GUARD).double().contiguous()
        o = torch.full(self.o.view.shape, torch.nan, dtype=torch.float64, device=pool.device)
        inputs = {name: getattr(self, name).double() for name in INPUTS[:7]}
        reference.pool.decode(
            **inputs, ssm_states=pool, read_indices=self.read, o=o, write_indices=self.write, dtype=torch.float64,
            **self.options,
        )  # fmt: skip
        return o, pool

    def _inputs(self) -> list[Tensor]:
        return [x for name in INPUTS if (x := getattr(self, name)) is not None]


def as_bits(x: Tensor) -> Tensor:
    return bits(x) if x.is_floating_point() else x


def make(
    N: int = 3,
    H: int = 2,
    HV: int = 4,
    *,
    V: int = 128,
    K: int = 128,
    pool: torch.dtype = torch.bfloat16,
    slots: int | None = None,
    moves: bool = False,
    pitched: bool = False,
    bias: torch.dtype = torch.float32,
    gate: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DecodeCase:
    """Random inputs. `moves`: the new states go to slots that no request reads; `pitched`: gaps between slots, output
    rows and mixed rows, and strided a, b."""
    rng = torch.Generator().manual_seed(seed)
    slots = (2 * N if moves else N) + 2 if slots is None else slots

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    width = 2 * H * K + HV * V
    mixed = normal(N, width + (8 if pitched else 0))[:, :width]
    if not options.get("use_qk_l2norm_in_kernel", True):
        mixed[:, H * K : 2 * H * K] /= 16  # near unit length, else the recurrence explodes
    q, k, v = mixed.split((H * K, H * K, HV * V), dim=1)
    ba = normal(N, HV, 2, dtype=gate)
    a, b = (ba[..., 0], ba[..., 1]) if pitched else (ba[..., 0].contiguous(), ba[..., 1].contiguous())
    state = (normal(slots, HV, V, K, dtype=torch.float32) * 0.5).to(pool)
    order = torch.randperm(slots, generator=rng).int().to(device)
    unset = torch.full((N, HV, V), torch.nan, dtype=torch.bfloat16, device=device)
    return DecodeCase(
        mixed, q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), a, b,
        (torch.rand(HV, generator=rng) * 2).to(device), normal(HV, dtype=bias),
        Buffer.make(state, (16,) if pitched else ()), order[:N],
        order[N : 2 * N] if moves else None,
        Buffer.make(unset, (8,) if pitched else ()), options,
    )  # fmt: skip


def set_slots(index: Tensor, *slots: int) -> None:
    """The first requests' slots."""
    index[: len(slots)] = torch.tensor(slots, dtype=index.dtype)


def most_requests_of_the_small_tile(HV: int = 4, V: int = 128, pool: torch.dtype = torch.bfloat16) -> int:
    """With one more the program takes its other tile."""
    config = plan(
        H=1, HV=HV, K=128, V=V, pool=str(pool)[6:], gate_dtype="bfloat16", bias_dtype="float32", l2norm=True,
        packed=False, moves=False,
    ).config  # fmt: skip
    return int(config.few_up_to // (HV * V * config.lanes // (32 * config.few_rows)))


def beyond_rounding(x: Tensor, want: Tensor) -> float:
    """Largest error of an element beyond rounding to nearest in the dtype of x, over the root mean square of `want`."""
    excess = (x.double() - want).abs() - HALF_UNIT[x.dtype] * want.abs()
    worst = (excess.max() / want.square().mean().sqrt()).item()
    return max(worst, 0.0) if worst == worst else float("inf")


def check_close(name: str, x: Tensor, want: Tensor, evidence: Evidence, arithmetic: float) -> None:
    """x is `want` rounded to its dtype, as a whole and in each element, up to `arithmetic` of the root mean square."""
    if not want.any():
        assert not x.any(), f"{name} is not zero"
        return
    limit = ROUNDING[x.dtype]
    evidence.at_most(f"{name} in {str(x.dtype)[6:]}, relative L2 against fp64", relative_l2(x, want), limit)
    evidence.at_most(
        f"{name}: an element's error beyond its rounding, over the RMS", beyond_rounding(x, want), arithmetic
    )


def check(
    case: DecodeCase, evidence: Evidence, want: tuple[Tensor, Tensor] | None = None, arithmetic: float = 4e-6
) -> None:
    """Compare what the call left in the buffers of `case` with fp64, and everything else with what it was.

    Slots that several requests write hold anything, and so do the outputs of the requests that read them.
    """
    o, pool = want or case.expected()
    slots = range(len(case.pool.view))
    read = case.read.tolist()
    write = read if case.write is None else case.write.tolist()
    written = [target for source, target in zip(read, write, strict=True) if source in slots and target in slots]
    shared = {slot for slot in written if written.count(slot) > 1}
    good = [n for n, source in enumerate(read) if source in slots and source not in shared]
    absent = [n for n, source in enumerate(read) if source not in slots]
    assert not as_bits(case.o.view[absent]).any(), "an output of padding is not zero"
    if good:
        check_close("o", case.o.view[good], o[good], evidence, arithmetic)
    stored = sorted(set(written) - shared)
    if stored:
        check_close("states", case.pool.view[stored], pool[stored], evidence, arithmetic)
    untouched = [slot for slot in slots if slot not in written]
    assert not case.pool.changed()[untouched].any(), "a slot that no request writes changed"
    for buffer in (case.pool, case.o):
        assert buffer.gaps_intact(), "bytes outside a view changed"
