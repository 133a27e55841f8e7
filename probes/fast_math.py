"""What does TL_ENABLE_FAST_MATH change in the gates' functions?

The generated source is the same; nvcc then turns expf into one ex2.approx instruction, flushes subnormal numbers and
approximates divisions. The error of the exponential must stay within CUDA's documented bound, which grows with |x|.
Fast math is an nvcc flag, so only a GPU can answer with values.
"""

from typing import Any

from probes import SINGLE_ROLE, math_primitives

Config = math_primitives.Config
build = math_primitives.build

PASS_CONFIGS: dict[str, Any] = {**SINGLE_ROLE, "tl.enable_fast_math": True}
