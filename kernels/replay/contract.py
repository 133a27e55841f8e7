"""What replay accepts beyond the inputs that it shares with verify (kernels/verify/contract.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import checks
from kernels.replay.config import MARKED
from kernels.replay.plan import MOST_TOKENS
from kernels.verify import contract
from kernels.verify.contract import INDEX, packed
from reference.ring import CURSORS

if TYPE_CHECKING:
    from kernels.replay.ring import Window


def packed_inputs(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, o: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """`o`, allocated like v if it is None; q, k, v, o without a leading dimension of 1; a, b without."""
    if o is None:
        packed("v", v, 3)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    tokens = tuple(packed(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v), ("o", o)))
    return o, tokens, (packed("a", a, 2), packed("b", b, 2))


def facts(k: Tensor, v: Tensor, ssm_states: Tensor, a: Tensor, dt_bias: Tensor, l2norm: bool) -> dict[str, Any]:
    """What `plan` and its like ask for, of packed and checked inputs."""
    return {
        "H": k.shape[1],
        "HV": v.shape[1],
        "K": k.shape[2],
        "V": v.shape[2],
        "pool": checks.dtype_name(ssm_states),
        "gate_dtype": checks.dtype_name(a),
        "bias_dtype": checks.dtype_name(dt_bias),
        "l2norm": l2norm,
    }


def check_tokens(cu_seqlens: Tensor, NT: int, max_tokens: int) -> None:
    """The NT tokens of the requests, and the bound on those of one; see `kernels.replay.verify`."""
    if max_tokens > MOST_TOKENS:
        raise ValueError(
            f"max_tokens is {max_tokens}, must be at most {MOST_TOKENS}; for longer requests call "
            "kernels.verify.recurrent_gated_delta_rule_verify with negative intermediate_state_indices, "
            "which stores no states either"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, must be between 1 and {MOST_TOKENS}; pass {MOST_TOKENS}")
    N = cu_seqlens.shape[0] - 1
    if N and N * max_tokens < NT:
        raise ValueError(
            f"{NT} tokens in {N} requests do not fit max_tokens = {max_tokens} each; {_remedy(-(-NT // N))}"
        )
    if cu_seqlens.device.type == "cpu":
        _check_lengths(cu_seqlens, NT, max_tokens)


def _check_lengths(cu_seqlens: Tensor, NT: int, max_tokens: int) -> None:
    """On the host the values can be checked for nothing; on a device that would be a synchronisation."""
    tokens = contract.longest(cu_seqlens, NT)
    if tokens > max_tokens:
        raise ValueError(f"a request has {tokens} tokens, max_tokens is {max_tokens}; {_remedy(tokens)}")


def _remedy(tokens: int) -> str:
    if tokens <= MOST_TOKENS:
        return f"pass max_tokens={tokens} or more"
    return f"more than {MOST_TOKENS} are for kernels.verify.recurrent_gated_delta_rule_verify"


def check_commit(
    k: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    target_indices: Tensor | None,
    query_start_loc: Tensor,
    accepted_lengths: Tensor,
) -> tuple[Tensor, ...]:
    """Types, dtypes, shapes and devices of everything but the gates; see `kernels.replay.commit`.

    Returns k, v, ssm_states, cache_indices, target_indices, query_start_loc and accepted_lengths, the indices with
    canonical strides.
    """
    reference = checks.computes_reference(k)
    floats = checks.REFERENCE_FLOATS if reference else (torch.bfloat16,)
    states = checks.REFERENCE_FLOATS if reference else checks.FLOATS
    (NT, H, K), device = k.shape, k.device
    checks.tensor("k", k, (None, None, None), floats, device)
    checks.tensor("v", v, (NT, None, None), floats, device)
    HV, V = v.shape[1:]
    if not H or HV % H:
        raise ValueError(f"v has {HV} heads and k has {H}; HV must be a multiple of H")
    checks.tensor("ssm_states", ssm_states, (None, HV, V, K), states, device)
    checks.tensor("cache_indices", cache_indices, (None,), INDEX, device)
    N = cache_indices.shape[0]
    given = {
        "cache_indices": cache_indices,
        "target_indices": cache_indices if target_indices is None else target_indices,
        "query_start_loc": query_start_loc,
        "accepted_lengths": accepted_lengths,
    }
    for name, x in given.items():
        checks.tensor(name, x, (N + 1 if name == "query_start_loc" else N,), INDEX, device)
    return k, v, ssm_states, *(checks.inner_contiguous(name, x, 1) for name, x in given.items())


def launchable_states(k: Tensor, v: Tensor, ssm_states: Tensor) -> tuple[Tensor, ...]:
    """The three as the SM90 programs take them: canonical strides throughout; views, never copies.

    Raises ValueError for what the programs need beyond the contract: a Hopper GPU, the state shapes they are built for,
    and 16-byte accesses.
    """
    checks.hopper("k", k)
    checks.supported(k.shape[2], v.shape[2])
    return tuple(checks.wide(name, x, 1) for name, x in (("k", k), ("v", v), ("ssm_states", ssm_states)))


def window_rows(capacity: int, max_tokens: int) -> int:
    """Rows of a slot: old tokens that are folded, the history behind them (either may be as long as the capacity or one
    call's tokens), and new tokens."""
    return 2 * max(capacity, max_tokens) + max_tokens


def check_window_sizes(ssm_states: Tensor, max_tokens: int, capacity: int) -> None:
    """What a window is allocated for; see `kernels.replay.ring.Window.allocate`."""
    if not isinstance(ssm_states, Tensor) or ssm_states.dim() != 4:
        raise ValueError(
            f"ssm_states has shape {tuple(getattr(ssm_states, 'shape', ()))}, must be (slots, HV, V, K); pass the pool"
        )
    for name, value, least in (("max_tokens", max_tokens, 1), ("capacity", capacity, 0)):
        if not least <= value <= MOST_TOKENS:
            raise ValueError(f"{name} is {value}, must be between {least} and {MOST_TOKENS}; pass {MOST_TOKENS}")


def check_slots(window: Window, cache_indices: Tensor) -> Tensor:
    """int32 [N] on the device of the window. Returns it with canonical strides."""
    checks.tensor("cache_indices", cache_indices, (None,), INDEX, window.cursors.device)
    return checks.inner_contiguous("cache_indices", cache_indices, 1)


def check_window(window: Window, q: Tensor, ssm_states: Tensor, a: Tensor) -> None:
    """The window belongs to this pool, and keeps inputs of these dtypes and heads."""
    slots, HV, V, K = ssm_states.shape
    R, H = window.k.shape[1], q.shape[1]
    want = {
        "window.k": (window.k, (slots, R, H, K), q.dtype),
        "window.v": (window.v, (slots, R, HV, V), q.dtype),
        "window.a": (window.a, (slots, R, HV), a.dtype),
        "window.b": (window.b, (slots, R, HV), a.dtype),
        "window.cursors": (window.cursors, (slots, CURSORS), torch.int32),
        "window.marks": (window.marks, (slots, HV, -(-V // MARKED)), torch.int32),
    }
    for name, (x, shape, dtype) in want.items():
        if x.shape != shape or x.dtype != dtype or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, must be {dtype} {shape} on {q.device}, "
                "contiguous; allocate the window for this pool, these heads and this dtype of the gates"
            )
    needed = window_rows(window.capacity, window.max_tokens)
    if needed > R:
        raise ValueError(
            f"the window has {R} rows, capacity {window.capacity} and max_tokens {window.max_tokens} need {needed}; "
            "allocate another"
        )
