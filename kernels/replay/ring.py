"""Verify and decode behind a ring of accepted tokens: the state in the pool is written once in several steps.

A state is read by every call and written by few: accepted tokens stay in a ring of at most 16 beside it, a rejected
token is a cursor that does not advance, and only a history that grows too long is folded into the state, by the next
verify, which reads that state anyway. A step of a server:

    o = ring.verify(..., cache_indices, query_start_loc, window)     outputs of the draft tokens (or of one token)
    ring.accept(window, cache_indices, accepted_lengths)             after sampling; moves cursors alone

`ring.flush` brings the states in the pool up to date, and `ring.reset` starts slots over whose states are.

CUDA tensors run on torch's current stream without synchronisation and, with `o` given, without allocation, and can be
captured in a CUDA graph. CPU tensors compute `reference.ring`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import reference.gating
import reference.ring
from kernels import checks, runtime
from kernels.replay import contract
from kernels.replay.config import MARKED
from kernels.replay.plan import MOST_TOKENS, cursors_plan, window_plan
from kernels.verify.contract import check_inputs, launchable_inputs
from reference.recurrence import softmax_scale


@dataclasses.dataclass(frozen=True)
class Window:
    """What is kept beside a pool of states: of every slot the tokens that its state does not hold yet.

    Attributes:
        k: bf16 [slots, rows, H, K]. v: bf16 [slots, rows, HV, V]. a, b: [slots, rows, HV], raw gates. Contiguous.
        cursors: int32 [slots, 4]: first row, tokens that the next verify folds into the state, history, folds so far.
        marks: int32 [slots, HV, ceil(V / 32)]: the last fold that was carried out.
        capacity: tokens of history that may be kept, 0 to 16. max_tokens: new tokens of a request in a verify, 1 to 16.
    """

    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    cursors: Tensor
    marks: Tensor
    capacity: int
    max_tokens: int

    @classmethod
    def allocate(
        cls,
        ssm_states: Tensor,
        H: int,
        *,
        max_tokens: int = MOST_TOKENS,
        capacity: int = MOST_TOKENS,
        dtype: torch.dtype = torch.bfloat16,
        gate_dtype: torch.dtype = torch.bfloat16,
    ) -> Window:
        """An empty window for a pool [slots, HV, V, K] and H key heads, on the pool's device.

        Raises ValueError for a max_tokens outside 1 to 16, a capacity outside 0 to 16, or a pool of another rank.
        """
        contract.check_window_sizes(ssm_states, max_tokens, capacity)
        slots, HV, V, K = ssm_states.shape
        rows, device = contract.window_rows(capacity, max_tokens), ssm_states.device
        return cls(
            k=torch.zeros(slots, rows, H, K, dtype=dtype, device=device),
            v=torch.zeros(slots, rows, HV, V, dtype=dtype, device=device),
            a=torch.zeros(slots, rows, HV, dtype=gate_dtype, device=device),
            b=torch.zeros(slots, rows, HV, dtype=gate_dtype, device=device),
            cursors=torch.zeros(slots, reference.ring.CURSORS, dtype=torch.int32, device=device),
            marks=torch.zeros(slots, HV, -(-V // MARKED), dtype=torch.int32, device=device),
            capacity=capacity,
            max_tokens=max_tokens,
        )

    @property
    def rows(self) -> int:
        """Of a slot: room for a history that is folded, the one that follows it, and new tokens."""
        return self.k.shape[1]


def verify(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    window: Window,
    *,
    o: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """Outputs of the new tokens of every request, behind its state and its history; the new tokens go to the ring.

    The recurrence as in `kernels.replay.verify`. One token a request is a decode. The state of a request is written
    only where `accept` has asked for a fold. Calling again before `accept` gives the same and folds nothing twice.

    Args:
        A_log, a, dt_bias, q, k, v, b, query_start_loc, o, scale, use_qk_l2norm_in_kernel, allow_neg_eigval: as in
            `kernels.replay.verify`, with at most window.max_tokens tokens a request; a and b in the window's dtype.
        ssm_states: [slots, HV, V, K], K last, bf16, fp16 or fp32; slot pitch free.
        cache_indices: int32 [N], the slot of each request; a negative one (or one beyond the pool) marks padding: its
            output rows are zero and nothing is kept. Two requests must not share a slot.
        window: of this pool.
    Returns:
        o, shaped like v.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    result, (q, k, v, o), (a, b) = contract.packed_inputs(q, k, v, a, b, o)
    tensors = check_inputs(q, k, v, ssm_states, cache_indices, query_start_loc, o)
    gates = checks.raw_gates(a, b, A_log, dt_bias, v.shape[:2], v)
    contract.check_window(window, q, ssm_states, a)
    contract.check_tokens(tensors[5], q.shape[0], window.max_tokens)
    if not all(x.numel() for x in (v, ssm_states, cache_indices)):  # no tokens, no requests or no slot of any
        o.zero_()
        return result
    kept = window.k, window.v, window.a, window.b
    if checks.computes_reference(q):
        pool, indices, starts, _ = tensors[3:]
        reference.ring.verify(
            q, k, v, gates[0], gates[1], gates[2], gates[3], pool, indices, starts, o, kept, window.cursors,
            window.marks, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            allow_neg_eigval=allow_neg_eigval, dtype=reference.gating.working_dtype(q, ssm_states),
        )  # fmt: skip
        return result
    q, k, v, *paging = launchable_inputs(*tensors)
    program = window_plan(**contract.facts(k, v, ssm_states, a, dt_bias, use_qk_l2norm_in_kernel))
    runtime.launch(
        program, q, k, v, *gates, *paging, *kept, window.cursors, window.marks, softmax_scale(scale, q.shape[2]),
        2.0 if allow_neg_eigval else 1.0,
    )  # fmt: skip
    return result


def accept(window: Window, cache_indices: Tensor, accepted_lengths: Tensor) -> None:
    """Keep the first accepted_lengths[n] tokens of request n of the last `verify`, and forget the others.

    A history that would become longer than window.capacity is folded into its state by the next `verify`, and the
    accepted tokens begin another one.

    Args:
        window: as in `verify`.
        cache_indices: int32 [N], those of the last `verify`; padding is passed over.
        accepted_lengths: int32 [N] on the same device, 0 to the tokens that the request had; beyond window.max_tokens
            it is taken as that, below 0 as 0.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    _move(window, cache_indices, accepted_lengths, window.capacity)


def reset(window: Window, cache_indices: Tensor) -> None:
    """Forget what is kept of these slots: their states in the pool were set anew, by a prefill or a copy.

    Allocates, without synchronising.

    Args:
        cache_indices: int32 [N]; padding is passed over.
    Raises:
        TypeError, ValueError: cache_indices is out of its limits. Nothing was written.
    """
    contract.check_slots(window, cache_indices)
    count = len(window.cursors)
    named = window.cursors.new_zeros(count + 1, dtype=torch.bool)  # and one more for padding
    known = (cache_indices >= 0) & (cache_indices < count)
    named.index_fill_(0, torch.where(known, cache_indices, count).long(), True)
    # The number of folds stays, so that no mark of an earlier one is taken for a new one.
    window.cursors[:, : reference.ring.FOLD].masked_fill_(named[:count, None], 0)


def flush(
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    window: Window,
    *,
    use_qk_l2norm_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
) -> None:
    """Fold all that was accepted into the states of these slots, as for a copy of them or the end of a request.

    New tokens that nobody accepted are forgotten. Arguments as in `verify`. Allocates, without synchronising.
    """
    contract.check_slots(window, cache_indices)
    HV, V, K = ssm_states.shape[1:]
    none = torch.zeros_like(cache_indices)
    q = window.k.new_zeros(1, window.k.shape[2], K)
    v, gate = window.v.new_zeros(1, HV, V), window.a.new_zeros(1, HV)
    starts = torch.zeros(len(cache_indices) + 1, dtype=torch.int32, device=cache_indices.device)

    def fold() -> None:
        verify(
            A_log, gate, dt_bias, q, q, v, gate, ssm_states, cache_indices, starts, window,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip

    fold()  # what the last accept has asked for
    _move(window, cache_indices, none, -1)
    fold()
    _move(window, cache_indices, none, window.capacity)


def _move(window: Window, cache_indices: Tensor, accepted_lengths: Tensor, capacity: int) -> None:
    cache_indices = contract.check_slots(window, cache_indices)
    checks.tensor("accepted_lengths", accepted_lengths, cache_indices.shape, contract.INDEX, window.cursors.device)
    accepted_lengths = checks.inner_contiguous("accepted_lengths", accepted_lengths, 1)
    if not cache_indices.numel() or not window.cursors.numel():
        return
    if checks.computes_reference(window.cursors):
        reference.ring.accept(
            window.cursors, cache_indices, accepted_lengths, rows=window.rows, capacity=capacity,
            max_tokens=window.max_tokens,
        )  # fmt: skip
        return
    checks.hopper("cursors", window.cursors)
    runtime.launch(
        cursors_plan(), window.cursors, cache_indices, accepted_lengths, window.rows, capacity, window.max_tokens
    )
