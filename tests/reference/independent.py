"""The gated delta rule as others wrote it, behind the signature of `reference.recurrence.recurrent`.

Both distributions compute in fp32 whatever they are given, keep the state K-major and return the last state only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

Independent = Callable[..., tuple[Tensor, Tensor]]


class NotInstalled(Exception):
    """The distribution that holds an implementation is absent."""


def _transformers(name: str, q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None, **kwargs: Any) -> Any:
    if kwargs.pop("scale") is not None:
        raise ValueError("transformers' functions always scale by K**-0.5")
    # With FLA importable transformers puts FLA's kernel in place of the torch function; unwrap always finds the latter.
    function = inspect.unwrap(getattr(modeling_qwen3_next, name))
    o, state = function(
        q[None],
        k[None],
        v[None],
        g=kwargs["g"][None],
        beta=kwargs["beta"][None],
        initial_state=None if S0 is None else S0[None].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=kwargs["use_qk_l2norm"],
    )
    return o[0], state[0].mT


@functools.cache
def _fla_naive() -> ModuleType:
    """FLA's naive module by its path: importing the package itself needs Triton. Raises NotInstalled."""
    try:
        distribution = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise NotInstalled("fla-core is not installed") from error
    path = distribution.locate_file("fla/ops/gated_delta_rule/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_gated_delta_rule", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fla(name: str, q: Tensor, k: Tensor, v: Tensor, S0: Tensor | None, **kwargs: Any) -> Any:
    """FLA's functions neither normalise nor know head groups, so both are spelled out here."""
    if kwargs.pop("use_qk_l2norm"):
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    HV, H = v.shape[1], q.shape[1]
    heads = [h * H // HV for h in range(HV)]
    o, state = getattr(_fla_naive(), name)(
        q=q[None, :, heads],
        k=k[None, :, heads],
        v=v[None],
        g=kwargs["g"][None],
        beta=kwargs["beta"][None],
        scale=kwargs["scale"],
        initial_state=None if S0 is None else S0[None].mT,
        output_final_state=True,
    )
    return o[0], state[0].mT


def _with_defaults(function: Callable[..., Any], name: str) -> Independent:
    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        S0: Tensor | None = None,
        *,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(o [T, HV, V], the last state [HV, V, K]) in fp32."""
        with torch.no_grad():
            return function(name, q, k, v, S0, g=g, beta=beta, scale=scale, use_qk_l2norm=use_qk_l2norm)

    return call


TRANSFORMERS = {
    name: _with_defaults(_transformers, f"torch_{name}_gated_delta_rule") for name in ("recurrent", "chunk")
}
FLA = {name: _with_defaults(_fla, f"naive_{name}_gated_delta_rule") for name in ("recurrent", "chunk")}
