"""From a call's tensors and scalars to grid extents and kernel arguments, checking all that the PrimFunc states."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from tests.emulator.errors import EmulatorError
from tests.emulator.source import KernelParameter

#: scalar type in the generated source -> C type of the argument
SCALARS: Mapping[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}

_AXES = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")
_LIMITS = (2**31 - 1, 65535, 65535, 1024, 1024, 64)

#: names that may occur in the printed form of a symbolic expression
_NAMES = {
    "T": SimpleNamespace(
        min=min,
        max=max,
        int32=int,
        int64=int,
        Cast=lambda dtype, value: value,
        ceildiv=lambda a, b: -(-a // b),
        if_then_else=lambda condition, then, otherwise: then if condition else otherwise,
    ),
    "__builtins__": {},
}


class Expression:
    """A shape, stride or extent: an integer, a symbol, or an arithmetic expression of symbols such as ``N + 1``."""

    def __init__(self, value: Any) -> None:
        self.text = str(value)
        self.symbol = self.text if self.text.isidentifier() else None
        self._code: CodeType = compile(self.text, "<shape>", "eval")

    def __call__(self, symbols: Mapping[str, int]) -> int | None:
        """Its value, or None if a symbol in it has no value."""
        try:
            return int(eval(self._code, _NAMES, dict(symbols)))
        except (NameError, AttributeError):
            return None


@dataclass(frozen=True)
class TensorParameter:
    """A tensor of the PrimFunc."""

    name: str
    dtype: torch.dtype
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]  # empty: contiguous


@dataclass(frozen=True)
class ScalarParameter:
    """A scalar of the PrimFunc."""

    name: str


@dataclass(frozen=True)
class Launch:
    """All that a launch needs: extents of the grid and the block, and each kernel argument as (C type, value)."""

    extents: tuple[int, ...]
    values: tuple[tuple[Any, Any], ...]  # a tensor stands for its address


def _torch_dtype(name: str) -> torch.dtype:
    aliases = {"float8_e4m3": "float8_e4m3fn", "boolean": "bool"}
    dtype = getattr(torch, aliases.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise EmulatorError(f"tensors of type {name} have no torch equivalent")
    return dtype


class Signature:
    """The parameters of a PrimFunc next to those of its kernel."""

    def __init__(
        self, prim_func: Any, kernel_parameters: Sequence[KernelParameter], extents: Mapping[str, Any]
    ) -> None:
        self.parameters: list[TensorParameter | ScalarParameter] = []
        for parameter in prim_func.params:
            if parameter not in prim_func.buffer_map:
                self.parameters.append(ScalarParameter(parameter.name))
                continue
            buffer = prim_func.buffer_map[parameter]
            shape, strides = (tuple(Expression(e) for e in es) for es in (buffer.shape, buffer.strides))
            self.parameters.append(TensorParameter(buffer.name, _torch_dtype(str(buffer.dtype)), shape, strides))
        self.kernel_parameters = tuple(kernel_parameters)
        self.extents = tuple(Expression(extents.get(axis, 1)) for axis in _AXES)
        for k in self.kernel_parameters:
            if not k.pointer and k.ctype not in SCALARS:
                raise EmulatorError(f"kernel parameter {k.name} has type {k.ctype}: not emulated")

    def bind(self, args: Sequence[Any]) -> Launch:
        """Check `args` (PrimFunc order) and return the launch. Raises EmulatorError for any mismatch."""
        if len(args) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise EmulatorError(f"got {len(args)} arguments, expected {len(self.parameters)}: {names}")
        given = list(zip(self.parameters, args, strict=True))
        tensors = [(p, _checked_tensor(p, a)) for p, a in given if isinstance(p, TensorParameter)]
        values: dict[str, Any] = {p.name: a for p, a in given if isinstance(p, ScalarParameter)}
        symbols = {k: v for k, v in values.items() if isinstance(v, int)}
        for p, a in tensors:
            for expression, size in (*zip(p.shape, a.shape, strict=True), *zip(p.strides, a.stride(), strict=False)):
                if expression.symbol is not None:
                    symbols.setdefault(expression.symbol, size)
        for p, a in tensors:
            _check_layout(p, a, symbols)
        values = {**symbols, **values, **{p.name: a for p, a in tensors}}
        missing = [k.name for k in self.kernel_parameters if k.name not in values]
        if missing:
            raise EmulatorError(f"nothing gives {', '.join(missing)} a value")
        return Launch(
            self._grid(symbols),
            tuple((None if k.pointer else SCALARS[k.ctype], values[k.name]) for k in self.kernel_parameters),
        )

    def _grid(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        extents = []
        for axis, expression, limit in zip(_AXES, self.extents, _LIMITS, strict=True):
            value = expression(symbols)
            if value is None:
                raise EmulatorError(f"cannot evaluate the extent {expression.text} of {axis}")
            if not 1 <= value <= limit:
                raise EmulatorError(f"the extent {expression.text} = {value} of {axis} is not between 1 and {limit}")
            extents.append(value)
        return tuple(extents)


def _checked_tensor(p: TensorParameter, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        where = f"on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise EmulatorError(f"{p.name} must be a CPU tensor, is {where}")
    if tensor.dtype != p.dtype:
        raise EmulatorError(f"{p.name} must have dtype {p.dtype}, has {tensor.dtype}")
    if tensor.dim() != len(p.shape):
        raise EmulatorError(f"{p.name} must have {len(p.shape)} dimensions, has shape {tuple(tensor.shape)}")
    return tensor


def _check_layout(p: TensorParameter, tensor: torch.Tensor, symbols: Mapping[str, int]) -> None:
    for axis, expression in enumerate(p.shape):
        expected = expression(symbols)
        if expected is not None and expected != tensor.shape[axis]:
            raise EmulatorError(
                f"{p.name}.shape[{axis}] must be {expression.text} = {expected}, is {tensor.shape[axis]}"
            )
    if not p.strides:
        if not tensor.is_contiguous():
            raise EmulatorError(f"{p.name} must be contiguous, has strides {tensor.stride()}")
        return
    for axis, expression in enumerate(p.strides):
        expected = expression(symbols)
        if tensor.shape[axis] > 1 and expected is not None and expected != tensor.stride(axis):
            raise EmulatorError(
                f"{p.name}.stride({axis}) must be {expression.text} = {expected}, is {tensor.stride(axis)}"
            )
