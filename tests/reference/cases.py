"""Inputs of gate 1 and the error measure: one sequence each, made in fp64 from a seed."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

Decay = Literal["none", "mild", "strong", "total"]

FP64_LIMIT = 1e-10
FP32_LIMIT = 2e-6  # specs/gates/gate1.md derives both


def rel_l2(x: Tensor, expected: Tensor) -> float:
    """Relative L2 error; absolute where nothing but zero is expected. NaN and inf give inf."""
    difference, size = (x.double() - expected.double()).norm(), expected.double().norm()
    error = float(difference / size if size > 0 else difference)
    return error if error == error else float("inf")


@dataclasses.dataclass(frozen=True)
class Case:
    T: int
    H: int
    HV: int
    K: int
    V: int
    decay: Decay = "mild"
    neg_eigval: bool = False
    norm: bool = True
    scale: float | None = None
    initial: bool = True
    tiny: bool = False  # q and k about as long as the square root of the norm's eps
    seed: int = 0

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)[5:]]
        defaults = [f"{f.name}={f.default}" for f in dataclasses.fields(self)[5:]]
        changed = [option for option, default in zip(options, defaults, strict=True) if option != default]
        return "-".join([f"T{self.T}", f"H{self.H}", f"HV{self.HV}", f"K{self.K}", f"V{self.V}", *changed])

    def log_decay(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.T, self.HV, generator=generator, dtype=torch.float64)
        mild = -0.2 * uniform
        if self.decay == "none":
            return torch.zeros_like(mild)
        if self.decay == "mild":
            return mild
        hard = torch.rand(self.T, self.HV, generator=generator) < 0.2
        return torch.where(hard, -100 - 200 * uniform if self.decay == "strong" else -torch.inf, mild)

    def inputs(self, dtype: torch.dtype = torch.float64, stored_in: torch.dtype | None = None) -> dict[str, Any]:
        """Arguments of a recurrence, rounded to `dtype` and given in `stored_in` (None: `dtype`)."""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.T)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        size = (1e-3 if self.tiny else 1.0) * self.K**-0.5  # so that without a norm |k| is about 1 and S is stable
        tensors = {
            "q": size * normal(self.T, self.H, self.K),
            "k": size * normal(self.T, self.H, self.K),
            "v": normal(self.T, self.HV, self.V),
            "g": self.log_decay(generator),
            "beta": (2 if self.neg_eigval else 1) * torch.sigmoid(normal(self.T, self.HV)),
        }
        if self.initial:
            tensors["S0"] = normal(self.HV, self.V, self.K)
        rounded = {name: x.to(dtype).to(stored_in or dtype) for name, x in tensors.items()}
        return {**rounded, "scale": self.scale, "use_qk_l2norm": self.norm}


GROUPS = [Case(37, H, H * group, 24, 40, seed=group) for H, group in ((2, 1), (2, 2), (1, 3), (2, 4), (2, 8))]
CASES = [
    *GROUPS,
    Case(1, 2, 4, 24, 40, seed=11),
    Case(16, 2, 4, 40, 24, seed=12),
    Case(70, 2, 6, 40, 24, decay="none", seed=13),
    Case(70, 2, 6, 24, 40, decay="strong", seed=14),
    Case(130, 1, 3, 16, 16, decay="strong", seed=15),
    Case(70, 1, 2, 24, 40, neg_eigval=True, seed=16),
    Case(33, 2, 4, 24, 40, neg_eigval=True, decay="strong", seed=17),
    Case(37, 2, 4, 24, 40, norm=False, seed=18),
    Case(37, 2, 4, 24, 40, initial=False, seed=19),
    Case(37, 2, 4, 24, 40, tiny=True, seed=20),
    Case(37, 2, 4, 24, 40, scale=0.37, seed=21),
    Case(20, 2, 4, 24, 40, scale=0.0, seed=22),
    Case(20, 1, 2, 128, 128, seed=23),
]
TOTAL = [Case(37, 2, 4, 24, 40, decay="total", seed=31), Case(70, 1, 3, 16, 24, decay="total", seed=32)]
