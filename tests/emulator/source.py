"""From generated CUDA to a C++ translation unit: the same lines, with `emu.h` in place of the CUDA headers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.emulator.errors import EmulatorError

#: text in the generated source -> what it is and what to do about it
UNSUPPORTED = {
    r"\btl::tma_(?!store\b|store_arrive\b|store_wait\b)\w+|\bCUtensorMap\b": "TMA; build with TL_DISABLE_TMA_LOWER",
    r"\btl::mbarrier_\w+|\bmbarrier\w*|\btl::Barrier\b": "mbarrier; build with TL_DISABLE_WARP_SPECIALIZED",
    r"\btl::cluster_\w+|\btl::clc_\w+|\btl::block_rank_in_cluster\b": "thread block clusters",
    r"\btl::tcgen05\w*": "tensor memory, which SM90 does not have",
    r"\btl::warpgroup_reg_(?:de)?alloc\b": "warp specialisation; build with TL_DISABLE_WARP_SPECIALIZED",
    r"\basm\s*(?:volatile)?\s*\(": "inline PTX",
}

#: bytes of the element types a static __shared__ array may have, and the space for all of them
_STATIC_BYTES = {"float": 4, "int": 4, "uint": 4, "int64_t": 8, "bfloat16_t": 2, "half_t": 2, "uchar": 1, "bool": 1}
_STATIC_SPACE = 16384

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:include|if|ifdef|ifndef|else|elif|endif|undef|define)\b.*$", re.MULTILINE)
_DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_STATIC_SHARED = re.compile(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[(\d+)\];")


@dataclass(frozen=True)
class KernelParameter:
    """A parameter of the __global__ function, in its order."""

    name: str
    ctype: str
    pointer: bool


def signature(source: str, entry: str) -> tuple[KernelParameter, ...]:
    """The parameters of the kernel `entry`."""
    match = re.search(rf"\b{re.escape(entry)}\(([^;{{)]*)\)\s*\{{", source)
    if match is None:
        raise EmulatorError(f"no definition of the kernel {entry} in the generated source")
    parameters = []
    for text in filter(None, (p.strip() for p in match[1].split(","))):
        words = re.sub(r"\bconst\b|__restrict__|__grid_constant__|\*", " ", text).split()
        parameters.append(KernelParameter(words[-1], " ".join(words[:-1]), "*" in text))
    return tuple(parameters)


def check_supported(source: str) -> None:
    """Raise EmulatorError naming the first intrinsic that is known not to be modelled."""
    for pattern, reason in UNSUPPORTED.items():
        match = re.search(pattern, source)
        if match is not None:
            line = source.count("\n", 0, match.start()) + 1
            raise EmulatorError(f"line {line} of the generated source uses {match[0]}: not emulated ({reason})")


def translate(source: str, entry: str) -> str:
    """C++ for the host compiler; line n of `kernel.cu` in messages is line n of the generated source."""
    check_supported(source)
    offset = 0

    def place(match: re.Match[str]) -> str:
        nonlocal offset
        ctype, name, count = match[1], match[2], int(match[3])
        if ctype not in _STATIC_BYTES:
            raise EmulatorError(f"static __shared__ array {name} of type {ctype}: not emulated")
        start, offset = offset, offset + -(-count * _STATIC_BYTES[ctype] // 128) * 128
        if offset > _STATIC_SPACE:
            raise EmulatorError(f"static __shared__ arrays of more than {_STATIC_SPACE} bytes: not emulated")
        return f"{ctype}* const {name} = ({ctype}*)(emu::shared_memory() + emu::DYNAMIC_SHARED + {start});"

    body = _DIRECTIVE.sub("", source)
    body = _DYNAMIC_SHARED.sub(r"\1* const \2 = (\1*)emu::shared_memory();", body)
    body = _STATIC_SHARED.sub(place, body)
    indices = "const dim3 threadIdx = emu::thread_index(), blockIdx = emu::block_index();"
    body = re.sub(rf"(\b{re.escape(entry)}\([^;{{)]*\)\s*\{{)", rf"\1 {indices}", body, count=1)
    return f"""#include "emu.h"
#line 1 "kernel.cu"
{body}
#line 1 "launch.cpp"
static void** emu_arguments;
static void emu_entry() {{ emu::invoke({entry}, emu_arguments); }}
extern "C" __attribute__((visibility("default"))) const char* emu_launch(const int* extents, void** arguments) {{
  emu_arguments = arguments;
  return emu::launch(emu_entry, extents);
}}
"""
