"""What verify accepts. Every check raises before anything is launched or written."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kernels import checks

INDEX = (torch.int32,)


def packed(name: str, x: Tensor, dims: int) -> Tensor:
    """`x` without the leading batch dimension of size 1 that the public function allows."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, must be a torch.Tensor")
    if x.dim() == dims + 1 and x.shape[0] == 1:
        return x[0]
    if x.dim() != dims:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, must have {dims} dimensions, or {dims + 1} with a leading 1; "
            "pack the tokens of all requests into one dimension"
        )
    return x


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
) -> tuple[Tensor, ...]:
    """Types, dtypes, shapes and devices of everything but the gates and where states are kept.

    Returns the tensors in their order, the indices with canonical strides.
    """
    if not isinstance(q, Tensor) or q.dim() != 3:
        raise ValueError(f"q has shape {tuple(getattr(q, 'shape', ()))}, must be (NT, H, K)")
    reference = checks.computes_reference(q)
    floats = checks.REFERENCE_FLOATS if reference else (torch.bfloat16,)
    states = checks.REFERENCE_FLOATS if reference else checks.FLOATS
    (NT, H, K), device = q.shape, q.device
    checks.tensor("q", q, (None, None, None), floats, device)
    checks.tensor("k", k, (NT, H, K), floats, device)
    checks.tensor("v", v, (NT, None, None), floats, device)
    HV, V = v.shape[1:]
    if not H or HV % H:
        raise ValueError(f"v has {HV} heads and q, k have {H}; HV must be a multiple of H")
    checks.tensor("o", o, (NT, HV, V), floats, device)
    checks.tensor("ssm_states", ssm_states, (None, HV, V, K), states, device)
    checks.tensor("state_indices", state_indices, (None,), INDEX, device)
    N = state_indices.shape[0]
    checks.tensor("cu_seqlens", cu_seqlens, (N + 1,), INDEX, device)
    state_indices = checks.inner_contiguous("state_indices", state_indices, 1)
    cu_seqlens = checks.inner_contiguous("cu_seqlens", cu_seqlens, 1)
    return q, k, v, ssm_states, state_indices, cu_seqlens, o


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    intermediate_states: Tensor,
    intermediate_indices: Tensor,
    cache_steps: int | None,
) -> tuple[Tensor, ...]:
    """`check_inputs`, and where states are kept; see `recurrent_gated_delta_rule_verify`.

    Returns the tensors in their order, the indices with canonical strides and N row indices.
    """
    inputs = check_inputs(q, k, v, ssm_states, state_indices, cu_seqlens, o)
    NT, N, device = q.shape[0], state_indices.shape[0], q.device
    kept = (None, None, *ssm_states.shape[1:])
    checks.tensor("intermediate_states", intermediate_states, kept, (ssm_states.dtype,), device)
    checks.tensor("intermediate_indices", intermediate_indices, (None,), INDEX, device, least=(N,))
    rows = checks.inner_contiguous("intermediate_indices", intermediate_indices, 1)[:N]
    _check_steps(NT, N, intermediate_states.shape[1], cache_steps)
    if device.type == "cpu":
        _check_cu_seqlens(inputs[5], NT, intermediate_states.shape[1] if cache_steps is None else cache_steps)
    return *inputs, intermediate_states, rows


def _check_steps(NT: int, N: int, D: int, cache_steps: int | None) -> None:
    if cache_steps is not None and not 0 <= cache_steps <= D:
        raise ValueError(
            f"cache_steps is {cache_steps}, must be between 0 and the {D} steps of intermediate_states; "
            "allocate a larger buffer or pass cache_steps=None"
        )
    bound = D if cache_steps is None else cache_steps
    if N and N * bound < NT:
        raise ValueError(
            f"{NT} tokens in {N} requests do not fit {bound} steps each: intermediate_states needs at least "
            f"{-(-NT // N)} steps in dimension 1"
        )


def longest(cu_seqlens: Tensor, NT: int) -> int:
    """Tokens of the longest request. Raises ValueError for values that make no sense."""
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] > NT or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens is {starts}, must start at 0, never decrease and end at most at {NT}")
    return max(lengths, default=0)


def _check_cu_seqlens(cu_seqlens: Tensor, NT: int, bound: int) -> None:
    """On the host the values can be checked for nothing; on a device that would be a synchronisation."""
    tokens = longest(cu_seqlens, NT)
    if tokens > bound:
        raise ValueError(
            f"a request has {tokens} tokens, intermediate_states keeps {bound} steps; allocate at least "
            f"{tokens} in dimension 1"
        )


def check_activated_gates(g: Tensor, beta: Tensor, v: Tensor) -> None:
    """g, beta: fp32 [NT, HV]."""
    floats = checks.REFERENCE_FLOATS if checks.computes_reference(v) else (torch.float32,)
    checks.tensor("g", g, v.shape[:2], floats, v.device)
    checks.tensor("beta", beta, v.shape[:2], floats, v.device)


def check_norms(
    q_inv_norm: Tensor | None, k_inv_norm: Tensor | None, q: Tensor, l2norm: bool, lossless: bool
) -> tuple[Tensor, ...]:
    """q_inv_norm, k_inv_norm: fp32 [NT, H], both or neither. Returns those given, with canonical strides."""
    if q_inv_norm is None and k_inv_norm is None:
        return ()
    norms = {"q_inv_norm": q_inv_norm, "k_inv_norm": k_inv_norm}
    for name, x in norms.items():
        if x is None:
            raise ValueError(f"{name} is None, the other norm is given; pass both or neither")
    if not l2norm:
        raise ValueError(
            "q_inv_norm and k_inv_norm are given, and use_qk_l2norm_in_kernel is False: they say opposite things; "
            "leave it True to apply the norms, or leave them out"
        )
    if lossless:
        raise ValueError(
            "q_inv_norm and k_inv_norm are given, and lossless is True: its norms are part of the bits it promises; "
            "leave them out"
        )
    floats = checks.REFERENCE_FLOATS if checks.computes_reference(q) else (torch.float32,)
    for name, x in norms.items():
        checks.tensor(name, x, q.shape[:2], floats, q.device)
    return tuple(checks.inner_contiguous(name, x, 2) for name, x in norms.items() if x is not None)


def launchable_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
) -> tuple[Tensor, ...]:
    """What `check_inputs` returned as the SM90 programs take it: canonical strides throughout; views, never copies.

    Raises ValueError for what the programs need beyond the contract: a Hopper GPU, the state shapes they are built for,
    and 16-byte accesses.
    """
    checks.hopper("q", q)
    checks.supported(q.shape[2], v.shape[2])
    return (
        *(checks.wide(name, x, 1) for name, x in (("q", q), ("k", k), ("v", v), ("ssm_states", ssm_states))),
        state_indices,
        cu_seqlens,
        checks.wide("o", o, 1),
    )


def launchable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What `check` returned, as `launchable_inputs`."""
    *inputs, intermediate_states, rows = tensors
    return *launchable_inputs(*inputs), checks.wide("intermediate_states", intermediate_states, 2), rows


def check_head_batch(head_batch: int, q: Tensor, v: Tensor, lossless: bool) -> None:
    """1, 2 or 4 value heads that share a key head; see `recurrent_gated_delta_rule_verify`."""
    group = v.shape[1] // q.shape[1]
    if head_batch not in (1, 2, 4) or group % head_batch:
        raise ValueError(
            f"head_batch is {head_batch}, must be 1, 2 or 4 and divide the {group} value heads of a key head; pass 1"
        )
    if lossless and head_batch != 1:
        raise ValueError(f"head_batch is {head_batch} with lossless=True, must be 1 there; pass 1")
