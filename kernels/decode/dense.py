"""FLA's recurrent gated delta rule on dense fp32 states: check once, allocate, dispatch.

CUDA tensors run the TileLang program of `dense_plan`, on torch's current stream and with no host synchronisation; the
low-level function allocates nothing and can be captured in a CUDA graph. CPU tensors compute `reference.recurrence`
through the same checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import checks, runtime
from kernels.decode.dense_config import Lengths
from kernels.decode.dense_plan import plan
from reference.gating import working_dtype
from reference.recurrence import recurrent, softmax_scale

FLOATS = (torch.bfloat16, torch.float16)
BLOCK = 64  # tokens: the reference keeps the state after each token of a block


class Problem(NamedTuple):
    """The tensors of a call, tokens before heads, indices with canonical strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    seqlens: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def N(self) -> int:
        """States: one a batch row, or one a packed request."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def state_shape(self, state_v_first: bool) -> tuple[int, ...]:
        HV, V, K = *self.v.shape[2:], self.q.shape[3]
        return (self.N, HV, V, K) if state_v_first else (self.N, HV, K, V)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    seqlens: Tensor | None = None,
    head_first: bool = False,
    head_batch: int | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token, from and to dense fp32 states.

    The recurrence, per request and value head, S [K, V] in fp32 throughout:
        S = exp(g_t) S;  u_t = beta_t (v_t - S^T k_t);  S = S + k_t u_t^T;  o_t = scale S^T q_t

    Args:
        q, k: [B, T, H, K]; v: [B, T, HV, V]; bf16 or fp16, all of one dtype. HV is a multiple of H; value head h reads
            key head h // (HV // H). The last dimension is contiguous, the others have any pitch of whole 16 bytes.
        g (log decay), beta: [B, T, HV] fp32, any strides.
        scale: of q, after its norm; None means K ** -0.5, and 0.0 means 0.0.
        initial_state: [N, HV, K, V] fp32, where N is B, or the number of packed requests; None means zeros. A head's
            [K, V] is contiguous; pitches of requests and heads are free, in whole 16 bytes. Not written.
        output_final_state: return the state after each request's last token, else None. (FLA's default is False.)
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        seqlens: int32 [B], the valid tokens of each batch row, the first ones: T at most, 0 at least, other values
            are clamped to that. Tokens beyond them have o = 0 and touch no state, whatever they hold.
        head_first: q, k, v are [B, H or HV, T, K or V], g and beta [B, HV, T], and so is o. No copies are made.
        head_batch: 1, 2 or 4 value heads of one key head in a CTA, which share k and q in its L1 cache; None leaves it
            to the plan. The results have the same bits.
        cu_seqlens: int32 or int64 [N + 1], non-decreasing from 0: request n has tokens cu_seqlens[n] to
            cu_seqlens[n + 1] - 1 of the T packed ones of q [1, T, H, K]; none at all is allowed. Tokens after
            cu_seqlens[N] have o = 0. On a GPU the values cannot be checked; senseless ones write nothing outside o
            and the final states. Excludes seqlens.
        state_v_first: states are [N, HV, V, K].
    Returns:
        o, in shape and dtype of v, and the final states, newly allocated, shaped like initial_state. A request without
        tokens has its initial state there, or zeros.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    CPU tensors compute the reference in at least fp32: any K, V, strides and float dtypes, in fp64 if an input is.
    """
    if head_first:
        q, k, v = (_heads_second(name, x, 4) for name, x in (("q", q), ("k", k), ("v", v)))
        g, beta = (_heads_second(name, x, 3) for name, x in (("g", g), ("beta", beta)))
    try:
        problem = _check_tokens(q, k, v, g, beta, seqlens, cu_seqlens)
    except ValueError as error:
        raise ValueError(f"{error}; these shapes have the tokens before the heads") if head_first else error from None
    _check_head_batch(head_batch, q, v)
    shape = problem.state_shape(state_v_first)
    _check_state("initial_state", initial_state, shape, problem)
    B, T, HV, V = v.shape
    o = torch.empty((B, HV, T, V) if head_first else v.shape, dtype=v.dtype, device=v.device)
    final_state = None
    if output_final_state:
        given = () if initial_state is None else (initial_state,)
        final_state = torch.empty(shape, dtype=working_dtype(*problem[:5], *given), device=v.device)
    buffers = (o.transpose(1, 2) if head_first else o, initial_state, final_state)
    _run(problem, *buffers, scale, use_qk_l2norm_in_kernel, state_v_first, head_batch)
    return o, final_state


def fused_recurrent_gdr_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    o: Tensor,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    head_batch: int | None = None,
) -> None:
    """`recurrent_gated_delta_rule`, tokens before heads, into the caller's buffers. Allocates and returns nothing.

    o: like v, written whole. final_state: like initial_state, written whole; None stores no state. It may be
    initial_state itself, which is then updated in place; any other overlap of the two is an error that is not seen.
    """
    problem = _check_tokens(q, k, v, g, beta, seqlens, cu_seqlens)
    _check_head_batch(head_batch, q, v)
    floats = checks.REFERENCE_FLOATS if checks.computes_reference(q) else (q.dtype,)
    checks.tensor("o", o, v.shape, floats, q.device)
    shape = problem.state_shape(state_v_first)
    _check_state("initial_state", initial_state, shape, problem)
    _check_state("final_state", final_state, shape, problem)
    options = (scale, use_qk_l2norm_in_kernel, state_v_first, head_batch)
    _run(problem, o, initial_state, final_state, *options)


def _run(
    problem: Problem, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None, scale: float | None,
    l2norm: bool, state_v_first: bool, head_batch: int | None,
) -> None:  # fmt: skip
    """Of a checked call, the reference or the launch."""
    reference = checks.computes_reference(problem.q)
    if not reference:
        problem, (o, initial_state, final_state) = _launchable(problem, o, initial_state, final_state)
    if _nothing_to_do(problem, o, initial_state, final_state):
        return
    if reference:
        _compute_reference(problem, o, initial_state, final_state, scale, l2norm, state_v_first)
        return
    (H, K), (HV, V) = problem.q.shape[2:], problem.v.shape[2:]
    index = problem.cu_seqlens if problem.seqlens is None else problem.seqlens
    lengths: Lengths = "all" if index is None else "seqlens" if problem.cu_seqlens is None else "cu_seqlens"
    program = plan(
        H=H, HV=HV, K=K, V=V, dtype=checks.dtype_name(problem.q), l2norm=l2norm, has_initial=initial_state is not None,
        stores_final=final_state is not None, lengths=lengths,
        index="int32" if index is None else checks.dtype_name(index), v_first=state_v_first, head_batch=head_batch,
    )  # fmt: skip
    optional = (x for x in (initial_state, final_state, index) if x is not None)
    runtime.launch(program, *problem[:5], o, *optional, softmax_scale(scale, K))


def _heads_second(name: str, x: Tensor, dims: int) -> Tensor:
    """A view with the tokens before the heads."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, must be a torch.Tensor")
    if x.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must have {dims} dimensions, the heads second")
    return x.transpose(1, 2)


def _check_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, seqlens: Tensor | None, cu_seqlens: Tensor | None
) -> Problem:
    """Types, dtypes, shapes and devices of the inputs, in token-before-head order."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q is {type(q).__name__}, must be a torch.Tensor")
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}, must be (B, T, H, K)")
    reference = checks.computes_reference(q)
    (B, T, H, K), device = q.shape, q.device
    checks.tensor("q", q, (None,) * 4, checks.REFERENCE_FLOATS if reference else FLOATS, device)
    floats = checks.REFERENCE_FLOATS if reference else (q.dtype,)
    gates = checks.REFERENCE_FLOATS if reference else (torch.float32,)
    checks.tensor("k", k, (B, T, H, K), floats, device)
    checks.tensor("v", v, (B, T, None, None), floats, device)
    HV = v.shape[2]
    if not H or not HV or HV % H:
        raise ValueError(f"v has {HV} heads and q, k have {H}; HV must be a multiple of H, and neither may be 0")
    checks.tensor("g", g, (B, T, HV), gates, device)
    checks.tensor("beta", beta, (B, T, HV), gates, device)
    if seqlens is not None and cu_seqlens is not None:
        raise ValueError("seqlens and cu_seqlens are both given, must be one of them; pass None for the other")
    if seqlens is not None:
        checks.tensor("seqlens", seqlens, (B,), (torch.int32,), device)
        seqlens = checks.inner_contiguous("seqlens", seqlens, 1)
    if cu_seqlens is not None:
        cu_seqlens = _check_cu_seqlens(cu_seqlens, B, T, device)
    return Problem(q, k, v, g, beta, seqlens, cu_seqlens)


def _check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int, device: torch.device) -> Tensor:
    checks.tensor("cu_seqlens", cu_seqlens, (None,), (torch.int32, torch.int64), device, least=(1,))
    if B != 1:
        raise ValueError(f"q has {B} batch rows, must have 1 with cu_seqlens; pack all tokens into one row")
    if device.type == "cpu":
        _check_starts(cu_seqlens, T)
    return checks.inner_contiguous("cu_seqlens", cu_seqlens, 1)


def _check_starts(cu_seqlens: Tensor, T: int) -> None:
    """On the host the values can be checked for nothing; on a device that would be a synchronisation."""
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] > T or any(end < start for start, end in itertools.pairwise(starts)):
        raise ValueError(f"cu_seqlens is {starts}, must start at 0, never decrease and end at most at {T}")


def _check_head_batch(head_batch: int | None, q: Tensor, v: Tensor) -> None:
    group = v.shape[2] // q.shape[2]
    if head_batch is not None and (head_batch not in (1, 2, 4) or group % head_batch):
        raise ValueError(
            f"head_batch is {head_batch}, must be 1, 2 or 4 and divide the {group} value heads of a key head; pass None"
        )


def _check_state(name: str, state: Tensor | None, shape: tuple[int, ...], problem: Problem) -> None:
    if state is not None:
        reference = checks.computes_reference(problem.q)
        dtypes = checks.REFERENCE_FLOATS if reference else (torch.float32,)
        checks.tensor(name, state, shape, dtypes, problem.q.device)


def _launchable(
    problem: Problem, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None
) -> tuple[Problem, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The same as the SM90 program takes it: canonical strides; views, never copies.

    Raises ValueError for what the program needs beyond the contract: a Hopper GPU, the state shapes it is built for,
    and 16-byte accesses.
    """
    q, k, v = problem[:3]
    checks.hopper("q", q)
    checks.supported(q.shape[3], v.shape[3])
    q, k, v, o = (checks.wide(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v), ("o", o)))
    states = (_wide_state("initial_state", initial_state), _wide_state("final_state", final_state))
    return problem._replace(q=q, k=k, v=v), (o, *states)


def _wide_state(name: str, state: Tensor | None) -> Tensor | None:
    if state is None:
        return None
    checks.pitches(name, state, 2, elements=4)
    return checks.inner_contiguous(name, state, 2)


def _nothing_to_do(problem: Problem, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None) -> bool:
    """No requests, whose output is zero, or no tokens, after which the state is what it was."""
    T = problem.q.shape[1]
    if problem.N and T:
        return False
    o.zero_()
    if final_state is not None:
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    return True


def _requests(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Of each request its batch row, first token and the one after its last."""
    B, T = problem.q.shape[:2]
    if problem.cu_seqlens is not None:
        yield from ((0, start, end) for start, end in itertools.pairwise(problem.cu_seqlens.tolist()))
    elif problem.seqlens is not None:
        yield from ((n, 0, min(max(length, 0), T)) for n, length in enumerate(problem.seqlens.tolist()))
    else:
        yield from ((n, 0, T) for n in range(B))


def _compute_reference(
    problem: Problem, o: Tensor, initial_state: Tensor | None, final_state: Tensor | None, scale: float | None,
    l2norm: bool, state_v_first: bool,
) -> None:  # fmt: skip
    dtype = working_dtype(*problem[:5], *(() if initial_state is None else (initial_state,)))
    HV, V, K = *problem.v.shape[2:], problem.q.shape[3]
    o.zero_()
    for n, (row, first, end) in enumerate(_requests(problem)):
        S = torch.zeros(HV, V, K, dtype=dtype)
        if initial_state is not None:
            S = (initial_state[n] if state_v_first else initial_state[n].mT).to(dtype)
        for start in range(first, end, BLOCK):
            tokens = slice(start, min(start + BLOCK, end))
            q, k, v, g, beta = (x[row, tokens].to(dtype) for x in problem[:5])
            out, states = recurrent(q, k, v, g, beta, S, scale=scale, use_qk_l2norm=l2norm)
            o[row, tokens] = out.to(o.dtype)
            S = states[-1]
        if final_state is not None:
            final_state[n] = S if state_v_first else S.mT
