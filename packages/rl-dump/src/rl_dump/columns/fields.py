"""What describes a column, and the one form its values are held in.

A `Column` is a field and its values in canonical form; the containers only ever see columns.

Invariant, matched by a test in `tests/unit/test_contract.py`: `Field.to_document` and
`header.field_of` are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import FieldDocument, Form, Kind

__all__ = ["Column", "ColumnInput", "Field", "stored_dtype"]

ColumnInput: TypeAlias = "np.ndarray[Any, Any] | RaggedArray | Sequence[Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What one column is; the keys of `contract.FieldDocument`, with the name.

    Example: `Field(name="tokens", kind="ragged", dtype="int64", stored="int32")`.
    """

    name: str
    """Name of the column."""
    kind: Kind
    """`scalar`, `ragged`, `text` or `object` (tagged JSON)."""
    dtype: str
    """Logical dtype: what reading gives back. `bfloat16` is given as float32."""
    stored: str
    """Dtype in the file."""
    trailing: tuple[int, ...] = ()
    """Dimensions after the ragged one."""
    nullable: bool = False
    """Whether some samples have no value."""
    response_aligned: bool = False
    """Whether there is one value per response token."""
    form: Form = "plain"
    """What the producer held per sample; see `contract.FieldDocument`."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the arrays a reader hands out; bfloat16 is float32."""
        return np.dtype(np.float32) if self.dtype == "bfloat16" else np.dtype(self.dtype)

    def to_document(self) -> FieldDocument:
        """Return the field as it stands in a dump's header, under its name."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "stored": self.stored,
            "trailing": list(self.trailing),
            "nullable": self.nullable,
            "response_aligned": self.response_aligned,
            "form": self.form,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One field's values for a run of samples."""

    field: Field
    """What the column is."""
    values: NDArray[Any] | RaggedArray | list[Any]
    """The values of N samples, by the field's kind.

    scalar: array [N]; ragged: RaggedArray of N items; text and object: list of N values, None where
    there is none.
    """
    valid: NDArray[np.bool_] | None = None
    """bool [N], False where a scalar or ragged value is missing (0 or empty there).

    None if no value is missing.
    """

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.values)

    def take(self, rows: NDArray[np.int64]) -> Column:
        """Copy the samples at `rows` [k], in that order."""
        values: Any = (
            [self.values[row] for row in rows]
            if isinstance(self.values, list)
            else self.values.take(rows)
        )
        return replace(self, values=values, valid=None if self.valid is None else self.valid[rows])

    def item(self, row: int) -> Any:
        """Return one sample's value: a Python number, an array, text or object; or None."""
        if self.valid is not None and not self.valid[row]:
            return None
        value = self.values[row]
        return value.item() if self.field.kind == "scalar" else value

    def plain(self) -> NDArray[Any] | RaggedArray | list[Any]:
        """Return the values as a caller hands them over; a list where some are missing (None)."""
        if self.valid is None or bool(self.valid.all()):
            return self.values
        return [self.item(row) for row in range(len(self))]


def stored_dtype(dtype: str) -> str:
    """Return the dtype that a logical dtype has in a Parquet file, before integers are narrowed.

    Few readers of Parquet know half floats; float32 holds every value of both half formats:
    `stored_dtype("bfloat16")` is `"float32"`.
    """
    return "float32" if dtype in {"float16", "bfloat16"} else dtype
