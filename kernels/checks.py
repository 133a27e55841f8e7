"""Input checks shared by the public functions: an error names the value, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import runtime

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
REFERENCE_FLOATS = (*FLOATS, torch.float64)

#: state shapes that the programs are built and tested for
SUPPORTED_K = (128,)
SUPPORTED_V = (64, 128, 256)


def computes_reference(x: Tensor) -> bool:
    """CPU tensors compute the reference, unless a CPU launcher (the emulator) stands in for the GPU."""
    return x.device.type == "cpu" and runtime.cpu_launcher is None


def tensor(
    name: str,
    x: object,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    least: Sequence[int] | None = None,
) -> None:
    """`x` is a tensor of `shape` (None: any size; `least`: sizes may be larger than that), dtype and device.

    Raises TypeError for a non-tensor or a wrong dtype, ValueError for a wrong shape or device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, must be a torch.Tensor")
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {x.dtype}, must be {names}; convert it with {name}.to({dtypes[0]})")
    matches = x.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=False)
    )
    if not matches:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must be ({wanted})")
    if least is not None and any(have < want for have, want in zip(x.shape, least, strict=True)):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must be at least {tuple(least)}")
    if x.device != device:
        raise ValueError(
            f"{name} is on {x.device}, the other inputs are on {device}; move it with {name}.to({str(device)!r})"
        )


def inner_contiguous(name: str, x: Tensor, dims: int) -> Tensor:
    """`x`, whose last `dims` dimensions are contiguous; the outer ones may have any pitch.

    torch leaves the stride of a dimension of size 1 open, a launch does not: such strides are made canonical, in a
    view. Raises ValueError where a larger dimension is not contiguous.
    """
    strides, expected = list(x.stride()), 1
    for dim in range(x.dim() - 1, x.dim() - 1 - dims, -1):
        if strides[dim] != expected and x.shape[dim] > 1:
            raise ValueError(
                f"{name} has strides {tuple(x.stride())}, the last {dims} dimensions must be contiguous; "
                f"pass {name}.contiguous() or a view that is sliced only in its outer dimensions"
            )
        strides[dim] = expected
        expected *= x.shape[dim]
    for dim in range(x.dim() - dims):
        if x.shape[dim] <= 1:
            strides[dim] = expected
    return x if strides == list(x.stride()) else x.as_strided(x.shape, strides)


def pitches(name: str, x: Tensor, dims: int, elements: int = 8) -> None:
    """Start address and the strides of the first `dims` dimensions allow 16-byte accesses."""
    if x.data_ptr() % 16:
        raise ValueError(
            f"{name} starts at an address that is {x.data_ptr() % 16} mod 16, must be 0; pass {name}.clone()"
        )
    for size, stride in zip(x.shape[:dims], x.stride()[:dims], strict=True):
        if size > 1 and stride % elements:
            raise ValueError(
                f"{name} has strides {tuple(x.stride())}, its outer strides must be multiples of {elements} elements; "
                f"pass {name}.contiguous() or pad its rows"
            )
        if size > 1 and not 0 <= stride < 2**31:
            raise ValueError(
                f"{name} has strides {tuple(x.stride())}, must lie between 0 and 2^31 - 1 elements; "
                f"pass {name}.contiguous()"
            )


def wide(name: str, x: Tensor, outer: int) -> Tensor:
    """`x` contiguous but for its first `outer` dimensions, which allow 16-byte accesses; a view, never a copy."""
    pitches(name, x, outer)
    return inner_contiguous(name, x, x.dim() - outer)


def hopper(name: str, x: Tensor) -> None:
    """`x` is where the programs run: on a Hopper GPU, or on the CPU for the launcher that stands in for one."""
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} is on {x.device}, must be on a CUDA device or on the CPU")
    if x.device.type == "cuda" and runtime.capability(x.device) != (9, 0):
        major, minor = runtime.capability(x.device)
        raise ValueError(f"{x.device} has compute capability {major}.{minor}, the programs need 9.0 (Hopper)")


def supported(K: int, V: int | None = None) -> None:
    """The programs are built for states of these sizes; None for a program that has no V."""
    if K not in SUPPORTED_K:
        raise ValueError(f"K is {K}, must be one of {SUPPORTED_K} on a GPU; CPU tensors take any K")
    if V is not None and V not in SUPPORTED_V:
        raise ValueError(f"V is {V}, must be one of {SUPPORTED_V} on a GPU; CPU tensors take any V")


def dtype_name(x: Tensor) -> str:
    """As configurations have it: "bfloat16"."""
    return str(x.dtype).removeprefix("torch.")


def raw_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, shape: Sequence[int], beside: Tensor
) -> tuple[Tensor, ...]:
    """a, b: [NT, HV] = `shape`; A_log, dt_bias: [HV]; on the device of `beside`.

    Returns them in this order, the last two with canonical strides.
    """
    reference = computes_reference(beside)
    floats = REFERENCE_FLOATS if reference else FLOATS
    NT, HV = shape
    tensor("a", a, (NT, HV), floats, beside.device)
    tensor("b", b, (NT, HV), floats if reference else (a.dtype,), beside.device)
    tensor("A_log", A_log, (HV,), floats if reference else (torch.float32,), beside.device)
    tensor("dt_bias", dt_bias, (HV,), floats, beside.device)
    return a, b, inner_contiguous("A_log", A_log, 1), inner_contiguous("dt_bias", dt_bias, 1)
