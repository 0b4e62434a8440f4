"""Whether the columns of one dump fit together: the same samples, and lengths that agree.

Axes: N samples, L prompt and response tokens of a sample, R its response tokens, nnz the ids of all
its nuclei.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.fields import Column
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import FIELD_RULES

__all__ = ["alignment_problems", "count_problems"]


_LENGTHS = ("total_lengths", "response_lengths")
_LENGTHS_OF_SHAPE = {
    "[L]": ("total_lengths", 0),
    "[R]": ("response_lengths", 0),
    "[R+1]": ("response_lengths", 1),
}
"""By the shape of a field: the column that says how many values a sample has, and how many more."""


def count_problems(columns: Mapping[str, Column]) -> list[str]:
    """List, in one sentence, the fields that hold different numbers of samples."""
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) <= 1:
        return []
    groups: dict[int, list[str]] = {}
    for name, count in counts.items():
        groups.setdefault(count, []).append(name)
    return [
        "fields hold different numbers of samples: "
        + "; ".join(f"{count} in {', '.join(names)}" for count, names in groups.items())
    ]


def alignment_problems(columns: Mapping[str, Column]) -> list[str]:
    """List every field whose lengths contradict other columns, one sentence each.

    Those are `total_lengths`, `response_lengths` and, for nucleus ids, the nucleus offsets.
    """
    given = {name: columns[name].values for name in _LENGTHS if name in columns}
    expected = {
        name: values
        for name, values in given.items()
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu"
    }
    problems = [
        f"{name}: must hold one whole number per sample" for name in given if name not in expected
    ]
    for name, column in columns.items():
        rule = FIELD_RULES.get(name)
        shape = "[R]" if column.field.response_aligned else (rule.shape if rule else "[]")
        if not isinstance(column.values, RaggedArray):
            if shape != "[]" and column.field.kind != "object":
                problems.append(f"{name}: must hold {shape} values per sample, got one per sample")
            continue
        lengths_name, extra = _LENGTHS_OF_SHAPE.get(shape, ("", 0))
        if lengths_name in expected:
            problems += _misaligned(
                column, expected[lengths_name] + extra, f"{lengths_name}{' + 1' if extra else ''}"
            )
    return problems + _nucleus_problems(columns)


def _misaligned(column: Column, lengths: NDArray[np.int64], name: str) -> list[str]:
    assert isinstance(column.values, RaggedArray)
    wrong = column.values.lengths != lengths
    if column.valid is not None:
        wrong &= column.valid
    at = np.flatnonzero(wrong)
    if not at.size:
        return []
    row = int(at[0])
    length, said = int(column.values.lengths[row]), int(lengths[row])
    differ = f"{name} says {said} ({at.size} samples differ)"
    return [f"{column.field.name}: sample {row} has {length} values, {differ}"]


def _nucleus_problems(columns: Mapping[str, Column]) -> list[str]:
    offsets, ids = columns.get("nucleus_offsets"), columns.get("nucleus_ids")
    if (
        offsets is None
        or ids is None
        or not isinstance(offsets.values, RaggedArray)
        or not isinstance(ids.values, RaggedArray)
    ):
        return []
    # A sample's offsets start at 0, so its last one is the number of its nucleus ids.
    ends = np.array([item[-1] if len(item) else 0 for item in offsets.values], np.int64)
    return _misaligned(ids, ends, "the last of nucleus_offsets")
