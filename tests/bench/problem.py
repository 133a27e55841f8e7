"""What is benchmarked: a shape, its inputs on the device, and the bytes that it has to move.

Needs nothing but torch and the reference, so that a process which cannot hold TileLang can build the same inputs from
the same seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from reference.gating import gates

K = V = 128
SCALE = K**-0.5
OPS = ("verify-snapshots", "verify-replay", "commit", "ring", "decode", "decode-dense", "decode-ring", "prepass")
RING_OPS = ("ring", "decode-ring")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: a cold measurement moves this many times the L2 cache before it comes back to the same states
COLD_FACTOR = 4
#: of a ring call: requests whose history is folded into their state, and the live history of the others
FOLDING_SHARE, HISTORY, FULL_HISTORY = 0.2, 6, 14
RING = 16  # tokens of history that a ring call may carry


@dataclasses.dataclass(frozen=True)
class Shape:
    """One row of the benchmark without its implementation. `pool` is a key of DTYPES; K = V = 128."""

    op: str
    N: int
    T: int
    H: int = 16
    HV: int = 32
    pool: str = "bf16"
    cold: bool = True

    def __post_init__(self) -> None:
        if self.op not in OPS or self.pool not in DTYPES:
            raise ValueError(f"{self}: op must be one of {', '.join(OPS)}; pool one of {', '.join(DTYPES)}")
        if min(self.N, self.T, self.H) < 1 or self.HV % self.H:
            raise ValueError(f"{self}: N, T and H must be positive, and HV a multiple of H")

    def __str__(self) -> str:
        return f"{self.op} N={self.N} T={self.T} {self.H}/{self.HV} {self.pool} {'cold' if self.cold else 'warm'}"

    @property
    def state_bytes(self) -> int:
        """Of one request: HV states [V, K] in the pool's dtype."""
        return self.HV * V * K * DTYPES[self.pool].itemsize

    @property
    def folding(self) -> int:
        """Requests of a ring call that fold, at least one."""
        return max(1, round(FOLDING_SHARE * self.N))

    @property
    def states_moved(self) -> int:
        """Request states that the op must read or write, over all requests."""
        moved = {"verify-snapshots": 1 + self.T, "decode": 2, "decode-dense": 2, "commit": 2}
        folded = self.folding if self.op in RING_OPS else 0
        reads = 0 if self.op == "prepass" else 1
        return self.N * moved.get(self.op, reads) + folded

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes of the call: states, and q, k, v, a, b in and o out, each once, in bf16.

        decode-dense has g and beta in place of a and b, in fp32.
        """
        gate = 4 if self.op == "decode-dense" else 2
        row = 0 if self.op == "commit" else 2 * (2 * self.H * K + 2 * self.HV * V) + gate * 2 * self.HV
        return self.states_moved * self.state_bytes + self.N * self.T * row


class Problem:
    """Inputs of a shape, seeded, on one device.

    `ways` sets of slots (and of snapshot rows) are visited in turn; a cold shape has so many that L2 holds none of
    them when it is visited again. Attributes, with NT = N * T:
        q, k: bf16 [NT, H, K]; v: [NT, HV, V]: strided views of one row `mixed` [NT, 2 H K + HV V]
        a, b: bf16 [NT, HV]; A_log, dt_bias: fp32 [HV], values that bf16 holds exactly (some peers round them to it)
        pool: [slots, HV, V, K]; slot 0 is used by nobody (a dummy in SGLang, null in vLLM)
        indices: one int32 [N] per way, each an allocation of its own (16-byte aligned)
        cu_seqlens: int32 [N + 1]; rows: int32 [N] = 0, 1, ...; lengths: int32 [N], accepted tokens of a commit
    For ring ops a request has history[n] accepted tokens that its state does not hold, the first ones of
        past_mixed [N * RING, 2 H K + HV V], past_a, past_b [N * RING, HV]; those with FULL_HISTORY are folded.
    """

    def __init__(self, shape: Shape, device: torch.device, l2_bytes: int, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        N, T, H, HV = shape.N, shape.T, shape.H, shape.HV
        rng = torch.Generator(device=device).manual_seed(seed)
        traffic = max(1, shape.states_moved) * shape.state_bytes
        self.ways = max(1, math.ceil(COLD_FACTOR * l2_bytes / traffic)) if shape.cold else 1

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng, device=device)

        NT = N * T
        self.mixed = normal(NT, 2 * H * K + HV * V).bfloat16()
        self.q, self.k, self.v = self.split(self.mixed)
        self.a, self.b = normal(NT, HV).bfloat16(), normal(NT, HV).bfloat16()
        self.A_log = (2 * torch.rand(HV, generator=rng, device=device)).bfloat16().float()
        self.dt_bias = normal(HV).bfloat16().float()
        slots = 1 + N * self.ways
        self.pool = torch.empty(slots, HV, V, K, dtype=DTYPES[shape.pool], device=device)
        for part in self.pool.split(max(1, 2**26 // (HV * V * K))):  # bounds the fp32 values in flight
            part.copy_(normal(*part.shape) * 0.5)
        order = (torch.randperm(slots - 1, generator=rng, device=device) + 1).int()
        self.indices = [order[way * N : (way + 1) * N].clone() for way in range(self.ways)]
        self.initial = self.pool[self.indices[0].long()]
        self.cu_seqlens = torch.arange(N + 1, dtype=torch.int32, device=device) * T
        self.rows = torch.arange(N, dtype=torch.int32, device=device)
        self.lengths = torch.randint(1, T + 1, (N,), generator=rng, device=device).int()
        self.history = torch.full((N,), HISTORY, dtype=torch.int32, device=device)
        self.history[torch.randperm(N, generator=rng, device=device)[: shape.folding]] = FULL_HISTORY
        if shape.op in RING_OPS:
            self.past_mixed = normal(N * RING, 2 * H * K + HV * V).bfloat16()
            self.past_a, self.past_b = normal(N * RING, HV).bfloat16(), normal(N * RING, HV).bfloat16()

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [rows, H, K] and v [rows, HV, V] as views of mixed [rows, 2 H K + HV V]."""
        H, HV = self.shape.H, self.shape.HV
        q, k, v = mixed.split((H * K, H * K, HV * V), dim=1)
        return q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))

    @functools.cached_property
    def snapshots(self) -> Tensor:
        """[ways, N, T, HV, V, K] in the pool's dtype: where each way's per-token states go."""
        s = self.shape
        return torch.zeros(self.ways, s.N, s.T, s.HV, V, K, dtype=self.pool.dtype, device=self.device)

    @functools.cached_property
    def o(self) -> Tensor:
        """bf16 [NT, HV, V]: an output buffer for implementations that take one."""
        return torch.empty(self.v.shape, dtype=torch.bfloat16, device=self.device)

    @functools.cached_property
    def initial_k_major(self) -> Tensor:
        """[ways, N, HV, K, V]: a copy of what each way's slots hold; nobody writes it."""
        s = self.shape
        found = torch.empty(self.ways, s.N, s.HV, K, V, dtype=self.pool.dtype, device=self.device)
        for way, indices in enumerate(self.indices):
            found[way].copy_(self.pool[indices.long()].mT)
        return found

    @functools.cached_property
    def final_k_major(self) -> Tensor:
        """[ways, N, HV, K, V]: where each way's states after the last token go, for those who take a buffer."""
        return torch.zeros_like(self.initial_k_major)

    @functools.cached_property
    def activated(self) -> tuple[Tensor, Tensor]:
        """g (log decay) and beta, fp32 [N, T, HV], of `a` and `b`; rounded once, from fp64."""
        g, beta = gates(self.A_log.double(), self.a.double(), self.dt_bias.double(), self.b.double())
        shape = self.shape.N, self.shape.T, self.shape.HV
        return g.float().view(shape), beta.float().view(shape)

    @functools.cached_property
    def dense(self) -> tuple[Tensor, ...]:
        """Contiguous copies of q, k, v, for peers that would otherwise copy them in every call."""
        return self.q.contiguous(), self.k.contiguous(), self.v.contiguous()

    def reset(self) -> None:
        """Give the slots of way 0 their first states again, and poison what a launch must write."""
        self.pool[self.indices[0].long()] = self.initial
        self.o.fill_(torch.nan)
        for name in ("snapshots", "final_k_major"):
            if name in self.__dict__:
                getattr(self, name)[0].fill_(torch.nan)

    def states_of_way_0(self) -> Tensor:
        """[N, HV, V, K]: a copy of what way 0's slots hold."""
        return self.pool[self.indices[0].long()]
