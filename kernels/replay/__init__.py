"""Gated DeltaNet speculative verify that stores no states, and the commit of the tokens that were accepted."""

from kernels.replay.api import commit, verify

__all__ = ["commit", "verify"]
