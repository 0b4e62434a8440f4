"""The exceptions of this package, and what a caller catches.

`DumpError`, a `ValueError`, covers a bad file, a bad argument and a failed write. A document of
another contract is an `UnsupportedContractError`, which is a `ValueError` of its own: whoever reads
files of unknown origin catches both.
"""

from rl_dump.contract_header import UnsupportedContractError

__all__ = ["DumpError", "RaggedError", "UnsupportedContractError", "WriteError"]


class DumpError(ValueError):
    """A dump that cannot be read, written or used as asked.

    The message says what, where and what to do.
    """


class RaggedError(DumpError):
    """Values and offsets that do not describe a ragged array."""


class WriteError(DumpError):
    """A dump that did not reach the disk; the message names the path and the cause."""
