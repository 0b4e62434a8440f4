"""Errors of rl-topp.

Invariant: whatever is wrong with data that a caller passed in is a `NucleusError`, so that one
`except` clause (or `except ValueError`) covers it; a file of another contract is an
`UnsupportedContractError`, a `ValueError` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_topp.contract_header import UnsupportedContractError

__all__ = ["NucleusError", "UnsupportedContractError"]


class NucleusError(ValueError):
    """Malformed kept sets, or a malformed reply that should carry them.

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

    @classmethod
    def raise_where(cls, found: Mapping[str, bool]) -> None:
        """Raise one error that lists the sentences of `found` that are true, or return.

        Args:
            found: by sentence, whether it holds.
        """
        cls.raise_if([sentence for sentence, holds in found.items() if holds])
