"""Small TileLang programs that the emulator's own tests run. Their PrimFuncs annotate parameters with local names,
so these modules do not postpone the evaluation of annotations."""

from typing import Any

#: plain copies and one role per thread, the form the emulator executes
PASS_CONFIGS: dict[str, Any] = {"tl.disable_tma_lower": True, "tl.disable_warp_specialized": True}
