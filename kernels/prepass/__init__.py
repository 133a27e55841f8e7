"""Gates and norms of a verify, computed once per token ahead of it, and the rule that says when that pays.

`kernels.verify.recurrent_gated_delta_rule_verify(prepass=True)` runs both launches; the function here is the level
below, where the caller owns every buffer.
"""

from kernels.prepass.api import fused_recurrent_gdr_verify_prepass
from kernels.prepass.plan import should_use_prepass

__all__ = ["fused_recurrent_gdr_verify_prepass", "should_use_prepass"]
