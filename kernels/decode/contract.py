"""What paged decode accepts. Every check raises before anything is launched or written."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks

INDEX = (torch.int32,)


def check_vectors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, shapes and devices of q, k [N, H, K] and v [N, HV, V]."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q is {type(q).__name__}, must be a torch.Tensor")
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be (N, H, K)")
    floats = _inputs(q)
    (N, H, K), device = q.shape, q.device
    checks.tensor("q", q, (None, None, None), floats, device)
    checks.tensor("k", k, (N, H, K), floats, device)
    checks.tensor("v", v, (N, None, None), floats, device)
    HV = v.shape[1]
    if not H or not HV or HV % H:
        raise ValueError(f"v has {HV} heads and q, k have {H}; HV must be a multiple of H, and neither may be 0")


def key_heads(mixed_qkv: Tensor, ssm_states: Tensor) -> int:
    """H of mixed_qkv [N, 2 H K + HV V], which follows from the states' shape."""
    for name, x, dims in (("mixed_qkv", mixed_qkv, 2), ("ssm_states", ssm_states, 4)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, must be a torch.Tensor")
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have {dims} dimensions")
    checks.tensor("mixed_qkv", mixed_qkv, (None, None), _inputs(mixed_qkv), mixed_qkv.device)
    HV, V, K = ssm_states.shape[1:]
    width = mixed_qkv.shape[1]
    H, rest = divmod(width - HV * V, 2 * K) if K else (0, 1)
    if rest or H < 1:
        raise ValueError(
            f"mixed_qkv has {width} columns, must be 2 H K + HV V with HV = {HV}, V = {V}, K = {K} of ssm_states"
        )
    if mixed_qkv.shape[0] > 1 and mixed_qkv.stride(1) != 1:
        raise ValueError(
            f"mixed_qkv has strides {tuple(mixed_qkv.stride())}, its rows must be contiguous; pass its .contiguous()"
        )
    return H


def split(mixed_qkv: Tensor, ssm_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [N, H, K] and v [N, HV, V] as views of mixed_qkv [N, 2 H K + HV V]."""
    H = key_heads(mixed_qkv, ssm_states)
    HV, V, K = ssm_states.shape[1:]
    q, k, v = mixed_qkv.split((H * K, H * K, HV * V), dim=1)
    return q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))


def check_paging(
    v: Tensor, K: int, ssm_states: Tensor, state_indices: Tensor, o: Tensor, write_indices: Tensor | None
) -> None:
    """Types, dtypes, shapes and devices of what a decode reads and writes by index, and of its output."""
    reference = checks.computes_reference(v)
    (N, HV, V), device = v.shape, v.device
    states = checks.REFERENCE_FLOATS if reference else checks.FLOATS
    checks.tensor("ssm_states", ssm_states, (None, HV, V, K), states, device)
    checks.tensor("state_indices", state_indices, (N,), INDEX, device)
    checks.tensor("o", o, (N, HV, V), _inputs(v), device)
    if write_indices is not None:
        checks.tensor("write_indices", write_indices, (N,), INDEX, device)


def _inputs(x: Tensor) -> tuple[torch.dtype, ...]:
    return checks.REFERENCE_FLOATS if checks.computes_reference(x) else (torch.bfloat16,)


def launchable(
    inputs: tuple[Tensor, ...], ssm_states: Tensor, indices: tuple[Tensor, ...], o: Tensor, K: int
) -> tuple[Tensor, ...]:
    """Checked tensors as the SM90 program takes them, in its order but for the gates; views, never copies.

    inputs: q, k, v, or mixed_qkv alone. Raises ValueError for what the program needs beyond the contract: a Hopper
    GPU, the state shapes it is built for, and 16-byte accesses.
    """
    checks.hopper("ssm_states", ssm_states)
    checks.supported(K, ssm_states.shape[2])
    names = ("q", "k", "v") if len(inputs) == 3 else ("mixed_qkv",)
    return (
        *(checks.wide(name, x, 1) for name, x in zip(names, inputs, strict=True)),
        checks.wide("ssm_states", ssm_states, 1),
        *(
            checks.inner_contiguous(name, x, 1)
            for name, x in zip(("state_indices", "write_indices"), indices, strict=False)
        ),
        checks.wide("o", o, 1),
    )
