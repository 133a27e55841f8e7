"""What replay accepts beyond the inputs that it shares with verify (kernels/verify/contract.py)."""

from __future__ import annotations

from torch import Tensor

from kernels.replay.plan import MOST_TOKENS
from kernels.verify import contract


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
