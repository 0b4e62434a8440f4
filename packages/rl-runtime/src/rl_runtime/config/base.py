"""What every section of the recipe shares.

Invariants: a section is frozen, refuses unknown keys and numbers that are not finite, and takes
each field's description from the docstring under it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """One table of a recipe: typed, frozen, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
