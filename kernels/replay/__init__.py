"""Gated DeltaNet speculative verify that stores no states: outputs alone, from a paged pool that is only read."""

from kernels.replay.api import verify

__all__ = ["verify"]
