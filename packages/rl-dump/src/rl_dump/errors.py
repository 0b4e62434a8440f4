"""Decide which exceptions this package raises, and what a caller catches.

Everything derives from `DumpError`, itself a `ValueError`: one `except` clause covers a bad file,
a bad argument and a failed write.
"""

from __future__ import annotations

__all__ = ["DumpError", "RaggedError", "UnsupportedContractError", "WriteError"]


class DumpError(ValueError):
    """Report a dump that cannot be read, written or used as asked; the message says what, where and what to do."""


class RaggedError(DumpError):
    """Report values and offsets that do not describe a ragged array."""


class UnsupportedContractError(DumpError):
    """Report a document whose contract this version does not read; the message names both ids and the fix."""


class WriteError(DumpError):
    """Report a dump that did not reach the disk; the message names the path and the cause."""
