"""Gated DeltaNet speculative verify that stores no states, the commit of accepted tokens, and a ring of them."""

from kernels.replay import ring
from kernels.replay.api import commit, verify

__all__ = ["commit", "ring", "verify"]
