"""What replay accepts. Every check raises before anything is launched or written."""

from __future__ import annotations

from torch import Tensor

from kernels.replay.plan import MOST_TOKENS
from kernels.verify import contract


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ssm_states: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    o: Tensor,
    max_tokens: int,
) -> tuple[Tensor, ...]:
    """Types, dtypes, shapes and devices of everything but the gates, and the lengths; see `kernels.replay.verify`.

    Returns the tensors in their order, the indices with canonical strides.
    """
    tensors = contract.check_inputs(q, k, v, ssm_states, state_indices, cu_seqlens, o)
    if max_tokens > MOST_TOKENS:
        raise ValueError(
            f"max_tokens is {max_tokens}, must be at most {MOST_TOKENS}; for longer requests call "
            "kernels.verify.recurrent_gated_delta_rule_verify with negative intermediate_state_indices, "
            "which stores no states either"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, must be between 1 and {MOST_TOKENS}; pass {MOST_TOKENS}")
    NT, N = q.shape[0], state_indices.shape[0]
    if N and N * max_tokens < NT:
        raise ValueError(
            f"{NT} tokens in {N} requests do not fit max_tokens = {max_tokens} each; {_remedy(-(-NT // N))}"
        )
    if q.device.type == "cpu":
        _check_lengths(tensors[5], NT, max_tokens)
    return tensors


def _check_lengths(cu_seqlens: Tensor, NT: int, max_tokens: int) -> None:
    """On the host the values can be checked for nothing; on a device that would be a synchronisation."""
    tokens = contract.longest(cu_seqlens, NT)
    if tokens > max_tokens:
        raise ValueError(f"a request has {tokens} tokens, max_tokens is {max_tokens}; {_remedy(tokens)}")


def _remedy(tokens: int) -> str:
    if tokens <= MOST_TOKENS:
        return f"pass max_tokens={tokens} or more"
    return f"more than {MOST_TOKENS} are for kernels.verify.recurrent_gated_delta_rule_verify"
