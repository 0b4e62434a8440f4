"""Columns of ids: which samples belong together, by integers or by strings.

One rule for every column: a sequence, a numpy array, an array of objects whose entries are numbers
or strings, or a tensor, which is detached and copied to the host where it is not there. All entries
are integers, of any size, or all are strings, which are numbered by first appearance. Booleans,
fractions and a mixture are refused. Ids are only compared, so the numbers say who belongs together
and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_metrics.arguments import IntArray, as_array, listed
from rl_metrics.errors import MetricsError

__all__ = ["Ids", "id_column", "id_entries"]

Ids = (
    Sequence[int]
    | Sequence[str]
    | npt.NDArray[np.integer[Any]]
    | npt.NDArray[np.str_]
    | npt.NDArray[np.object_]
)
"""One integer or string per sample, equal for samples that belong together; a tensor will do."""


def id_column(ids: Ids, num_samples: int | None, name: str) -> IntArray:
    """Return a column of ids as numbers that are equal where the ids are.

    Args:
        ids: [N], all integers of any size or all strings.
        num_samples: `N`; None where the ids say how many samples there are.
        name: how the column is called in errors.

    Returns:
        int64 [N], 0 for the first id, and so on by first appearance.

    Raises:
        MetricsError: for another number of ids, entries that are neither integers nor strings, or a
            mixture of both.

    Example:
        `["b", "a", "b"]` gives `[0, 1, 0]`, as `[7, -3, 7]` does.
    """
    numbers: dict[Any, int] = {}
    entries = id_entries(ids, num_samples, name)
    return np.array([numbers.setdefault(entry, len(numbers)) for entry in entries], np.int64)


def id_entries(ids: Ids, num_samples: int | None, name: str) -> list[Any]:
    """Return a column of ids as a list of Python integers or strings.

    Arguments and errors are those of `id_column`.
    """
    given = ids if hasattr(ids, "detach") else _entries(ids, name)
    if isinstance(given, list) and given:
        _refuse_mixed(given, name)
    if isinstance(given, list) and given and all(_is_id(entry) for entry in given):
        is_text = isinstance(given[0], str)
        entries = [str(entry) if is_text else int(entry) for entry in given]
        shape: tuple[int, ...] = (len(entries),)
    else:
        # A tensor, or entries that are none: their dtype decides.
        array = as_array(given, name)
        if array.size and array.dtype.kind not in "iu":
            raise MetricsError(
                f"{name}: entries are of type {array.dtype}; give integers or strings, equal for"
                " samples that belong together"
            )
        entries, shape = array.reshape(-1).tolist(), array.shape
    if shape != (shape[0] if shape and num_samples is None else num_samples,):
        told = "" if num_samples is None else f"{num_samples} loss masks but "
        raise MetricsError(f"{told}{name} of shape {shape}; give one id per sample")
    return entries


def _entries(ids: Any, name: str) -> Any:
    """Return a flat column as a list; an array of another shape as it is, for the error."""
    if isinstance(ids, np.ndarray):
        return ids.tolist() if ids.ndim == 1 else ids
    return listed(ids, name)


def _refuse_mixed(given: list[Any], name: str) -> None:
    """Refuse strings beside numbers, and objects that are neither; their dtype judges numbers."""
    # By type, not entry by entry: a million ids have one or two types.
    sorts = {kind: _sort_of_id(kind) for kind in set(map(type, given))}
    if set(sorts.values()) in ({"text"}, {"number"}):
        return
    first = sorts[type(given[0])]
    other = next((i for i, entry in enumerate(given) if sorts[type(entry)] != first), 0)
    beside = f" and {name}[{other}] is {given[other]!r}" if other else ""
    raise MetricsError(
        f"{name} must be all integers or all strings (try str(id)), but {name}[0] is"
        f" {given[0]!r}{beside}"
    )


def _sort_of_id(kind: type) -> str:
    """Return "text", "number" (also what only a dtype can judge), or "other"."""
    if issubclass(kind, str):
        return "text"
    numbers = (float, complex, np.generic, np.ndarray, list, tuple)
    return "number" if issubclass(kind, numbers) or hasattr(kind, "__index__") else "other"


def _is_id(entry: object) -> bool:
    is_integer = isinstance(entry, int | np.integer) and not isinstance(entry, bool | np.bool_)
    return is_integer or isinstance(entry, str)
