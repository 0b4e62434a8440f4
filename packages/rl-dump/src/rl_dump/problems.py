"""Decide how something wrong with a dump is reported: one record per finding."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Report one thing that is wrong with a dump.

    Example: `Problem(code="checksum", message="advantages: row group 3 is damaged",
    field="advantages")`.
    """

    code: str
    """Stable name of the kind of problem."""
    message: str
    """What is wrong, and where."""
    field: str | None = None
    """The field, if the problem is one field's."""
    row: int | None = None
    """The first row concerned, 0-based, if the problem is a sample's."""
