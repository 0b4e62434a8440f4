"""Errors of rl-topp.

Invariant: whatever is wrong with data that a caller passed in is a `NucleusError`, so that one
`except` clause (or `except ValueError`) covers it.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NucleusError", "UnsupportedContractError"]


class NucleusError(ValueError):
    """Kept sets, or a reply that should carry them, are malformed.

    Attributes:
        problems: every problem found, one sentence each; the message joins them.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems: tuple[str, ...] = problems

    @classmethod
    def raise_if(cls, problems: Sequence[str]) -> None:
        """Raise one error that lists `problems`, or return when there are none."""
        if problems:
            raise cls(*problems)


class UnsupportedContractError(NucleusError):
    """A document carries the id of another contract (or another major of ours)."""
