"""The public prepass function, and who decides whether a verify runs it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

import reference.gating
from kernels import checks, runtime
from kernels.prepass.plan import plan, should_use_prepass

#: overrides the rule for calls that do not say themselves: "0" or "1"
VARIABLE = "HOPPER_GDN_PREPASS"


def fused_recurrent_gdr_verify_prepass(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    g: Tensor,
    beta: Tensor,
    q_inv_norm: Tensor,
    k_inv_norm: Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> None:
    """Compute gates and inverse norms of all tokens into the caller's buffers, for `fused_recurrent_gdr_verify_fwd`.

    A verify that is given them leaves the same bits in every buffer as one that computes them itself. CUDA tensors
    are one launch on torch's current stream, without allocation or synchronisation: it can be captured in a CUDA
    graph. CPU tensors compute the reference, in the dtype of the outputs, which may be fp64 there.

    Args:
        q, k: [NT, H, K] bf16. Token pitch free, [H, K] contiguous.
        a, b: [NT, HV], both fp32, bf16 or fp16, any strides. A_log: [HV] fp32. dt_bias: [HV] fp32, bf16 or fp16.
        g: [NT, HV] fp32 contiguous, receives -exp(A_log) softplus(a + dt_bias), the log of the decay.
        beta: likewise, receives sigmoid(b), times two if `allow_neg_eigval`.
        q_inv_norm, k_inv_norm: [NT, H] fp32 contiguous, receive 1 / sqrt(sum of squares + 1e-6), without any scale.
    Raises:
        TypeError, ValueError: an argument is out of its limits. Nothing was launched or written.
    """
    gates, outputs = _check(q, k, a, b, A_log, dt_bias, g, beta, q_inv_norm, k_inv_norm)
    if not q.shape[0]:
        return
    if checks.computes_reference(q):
        _reference(q, k, gates, outputs, allow_neg_eigval)
        return
    checks.hopper("q", q)
    checks.supported(q.shape[2])
    q, k = checks.wide("q", q, 1), checks.wide("k", k, 1)
    program = plan(
        H=q.shape[1],
        HV=a.shape[1],
        K=q.shape[2],
        gate_dtype=checks.dtype_name(a),
        bias_dtype=checks.dtype_name(dt_bias),
    )
    runtime.launch(program, q, k, *gates, *outputs, 2.0 if allow_neg_eigval else 1.0)


def wanted(prepass: bool | None, N: int, NT: int, H: int, HV: int) -> bool:
    """Whether this call runs a prepass: what its argument says, else the environment variable, else the rule.

    Raises ValueError if the variable is read and is neither "0" nor "1".
    """
    if prepass is not None:
        return prepass
    said = os.environ.get(VARIABLE)
    if said is None:
        return should_use_prepass(N, NT, H, HV)
    if said not in ("0", "1"):
        raise ValueError(
            f"the environment variable {VARIABLE} is {said!r}, must be '0' (never a prepass) or '1' (always); "
            "unset it to follow kernels.prepass.should_use_prepass"
        )
    return said == "1"


def _check(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    g: Tensor, beta: Tensor, q_inv_norm: Tensor, k_inv_norm: Tensor,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """(a, b, A_log, dt_bias), (g, beta, q_inv_norm, k_inv_norm), both with canonical strides where they must be."""
    if not isinstance(q, Tensor) or q.dim() != 3:
        raise ValueError(f"q has shape {tuple(getattr(q, 'shape', ()))}, must be (NT, H, K)")
    if not isinstance(a, Tensor) or a.dim() != 2:
        raise ValueError(f"a has shape {tuple(getattr(a, 'shape', ()))}, must be (NT, HV)")
    reference = checks.computes_reference(q)
    floats = checks.REFERENCE_FLOATS if reference else (torch.bfloat16,)
    (NT, H, K), HV = q.shape, a.shape[1]
    checks.tensor("q", q, (NT, H, K), floats, q.device)
    checks.tensor("k", k, (NT, H, K), floats, q.device)
    if not H or HV % H:
        raise ValueError(f"a has {HV} heads and q, k have {H}; HV must be a multiple of H")
    gates = checks.raw_gates(a, b, A_log, dt_bias, (NT, HV), q)
    outputs = (("g", g, HV), ("beta", beta, HV), ("q_inv_norm", q_inv_norm, H), ("k_inv_norm", k_inv_norm, H))
    dtypes = (torch.float32, torch.float64) if reference else (torch.float32,)
    for name, x, heads in outputs:
        checks.tensor(name, x, (NT, heads), dtypes, q.device)
    return gates, tuple(checks.inner_contiguous(name, x, 2) for name, x, _ in outputs)


def _reference(
    q: Tensor, k: Tensor, gates: tuple[Tensor, ...], outputs: tuple[Tensor, ...], allow_neg_eigval: bool
) -> None:
    a, b, A_log, dt_bias = (x.to(outputs[0].dtype) for x in gates)
    values = (
        *reference.gating.gates(A_log, a, dt_bias, b, allow_neg_eigval),
        *(reference.gating.inverse_norm(x.to(to.dtype)) for x, to in zip((q, k), outputs[2:], strict=True)),
    )
    for value, output in zip(values, outputs, strict=True):
        output.copy_(value)
