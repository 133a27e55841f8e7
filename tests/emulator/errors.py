"""The one exception of the emulator."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A program that cannot be emulated, arguments that do not fit it, or an error the emulated program made."""
