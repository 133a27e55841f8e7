"""How far a result may be from fp64: one table for the tests of the kernels and for the benchmark."""

from __future__ import annotations

import torch

#: relative L2 limits of a stored result. Rounding to nearest moves an element by at most half a unit in its last
#: place, 2^-8 (bf16) or 2^-11 (fp16) of the start of its binade; over random values the root mean square of that is
#: 1.66e-3 (bf16) and 2.1e-4 (fp16). The limits leave a fifth for arithmetic; an fp32 result has only the error of
#: fp32 products.
ROUNDING = {torch.bfloat16: 2.0e-3, torch.float16: 2.5e-4, torch.float32: 1.0e-6}
