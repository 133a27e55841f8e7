"""Gate 0: one module per TileLang primitive the kernels stand on; `specs/gates/gate0.md` states each question.

A probe is a program (`Config`, `build`, `PASS_CONFIGS`) as small as its question allows. Its verdict, which can
fail, is in ``tests/probes``. `toolchain` turns generated CUDA into registers, spills and instruction counts.
"""

from __future__ import annotations

from typing import Any

#: Plain copies instead of TMA, and one role for all threads: TileLang's automatic warp specialisation would turn
#: the same text into a different kernel with twice the threads.
SINGLE_ROLE: dict[str, Any] = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}
