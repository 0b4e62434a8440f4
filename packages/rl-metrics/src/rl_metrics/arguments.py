"""What callers may hand over as one number, one count, or an array of numbers.

Invariants, tested: anything else raises an error of this package that says what the number was for;
a fraction is never cut to a count; text is never read as a number.
"""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt

from rl_metrics.errors import MetricsError

__all__ = [
    "BoolArray",
    "FloatArray",
    "IntArray",
    "as_array",
    "count",
    "finite_number",
    "flag",
    "listed",
    "number",
    "number_array",
]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_LARGEST_COUNT = 2**53
"""Counts beyond it are no longer exact as float64, and far beyond any number of ranks or tokens."""


def number(value: SupportsFloat, what: str) -> float:
    """Return one number as a Python float; NaN and infinity are numbers.

    Args:
        value: a Python or numpy number, or a 0-dim tensor.
        what: subject of the error, such as `"metric 'loss': the numerator"`.

    Raises:
        MetricsError: for text, None, complex numbers, anything with a dimension, and integers
            beyond the range of float64.
    """
    if type(value) is float:
        # By far the most frequent: spares thousands of metrics the questions below.
        return value
    shape = getattr(value, "shape", ())
    if "complex" in str(getattr(value, "dtype", type(value))):
        raise MetricsError(
            f"{what} is {type(value).__name__} {value}, a complex number; give a real one"
        )
    if isinstance(value, str | bytes | bytearray) or len(shape):
        given = f"of shape {tuple(shape)}" if len(shape) else repr(value)
        raise MetricsError(f"{what} is {type(value).__name__} {given}; give one number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise MetricsError(f"{what} is {type(value).__name__} ({error}); give one number") from None


def finite_number(
    value: SupportsFloat, what: str, *, above: float = -math.inf, at_least: float = -math.inf
) -> float:
    """Return one finite number inside a range.

    Args:
        value: as in `number`.
        what: subject of the error.
        above: the number must be greater than this.
        at_least: the number must not be smaller than this.

    Raises:
        MetricsError: as in `number`, for NaN and infinity, and outside the range.
    """
    result = number(value, what)
    if math.isfinite(result) and result > above and result >= at_least:
        return result
    bound = (
        f" above {above:g}"
        if above > -math.inf
        else f" of at least {at_least:g}"
        if at_least > -math.inf
        else ""
    )
    raise MetricsError(f"{what} is {result:g}; give a finite number{bound}")


def count(
    value: Any, what: str, *, minimum: int = 1, error: type[MetricsError] = MetricsError
) -> int:
    """Return a count as a Python int.

    Args:
        value: a Python or numpy integer. Fractions, also whole ones such as 2.0, and booleans are
            refused.
        what: subject of the error.
        minimum: smallest that passes; the largest is 2^53.
        error: class of the error.

    Raises:
        MetricsError: (or `error`) for anything else.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise error(
            f"{what} is {value!r} ({type(value).__name__}); give an integer of at least {minimum}"
        )
    if value < minimum:
        raise error(f"{what} is {value}; give an integer of at least {minimum}")
    if value > _LARGEST_COUNT:
        raise error(
            f"{what} is {value:.3g}; give an integer of at most 2^53"
            if value < 1e300
            else f"{what} is beyond float64; give an integer of at most 2^53"
        )
    return int(value)


def flag(value: Any, what: str) -> bool:
    """Return a switch as a Python bool.

    Args:
        value: True or False; nothing else is taken for one of them.
        what: subject of the error.

    Raises:
        MetricsError: for anything else.
    """
    if not isinstance(value, bool | np.bool_):
        raise MetricsError(f"{what} is {type(value).__name__}; give True or False")
    return bool(value)


def listed(values: Any, what: str) -> list[Any]:
    """Return an iterable as a list.

    Args:
        values: a sequence, an array, or any other iterable; text is none.
        what: beginning of the error, such as `"pieces"`.

    Raises:
        MetricsError: when it cannot be iterated over. What a generator of the caller's raises is
            the caller's.
    """
    try:
        iterator = None if isinstance(values, str | bytes) else iter(values)
    except TypeError:
        iterator = None
    if iterator is None:
        raise MetricsError(f"{what}: got {type(values).__name__}; give a list")
    return list(iterator)


def as_array(
    values: npt.ArrayLike,
    what: str,
    *,
    kinds: str = "biuf",
    error: type[MetricsError] = MetricsError,
) -> npt.NDArray[Any]:
    """Return anything array-like as a numpy array of real numbers, in its own dtype.

    Args:
        values: any shape: nested lists, numpy arrays, arrays of objects whose entries are numbers,
            tensors. A tensor is detached and copied to the host where it is not there; floating
            types that numpy lacks, such as bfloat16, become float32, which holds their values
            exactly.
        what: subject of the error.
        kinds: letters of numpy dtype kinds that pass.
        error: class of the error.

    Raises:
        MetricsError: (or `error`) for rows of unequal length, text, complex numbers, iterators and
            other objects.
    """
    try:
        array = np.asarray(_on_host(values))
        if array.dtype.kind == "O":
            # numpy and pandas put numbers into arrays of objects; their entries decide.
            array = np.asarray(array.tolist())
    except (TypeError, ValueError, RuntimeError) as reason:
        raise error(f"{what}: cannot be read as an array of numbers: {reason}") from None
    if array.dtype.kind not in kinds:
        raise error(
            f"{what}: entries are of type {array.dtype}; give numbers, in a list or an array"
        )
    return array


def _on_host(values: Any) -> Any:
    """Return a tensor as numpy can read it, anything else as it is.

    Tensors are known by their methods: this module imports no torch.
    """
    if not (hasattr(values, "detach") and hasattr(values, "cpu")):
        return values
    tensor = values.detach().cpu()
    return (
        tensor.float()
        if any(kind in str(tensor.dtype) for kind in ("bfloat16", "float8"))
        else tensor
    )


def number_array(values: npt.ArrayLike, what: str) -> npt.NDArray[np.float64]:
    """Return anything array-like as float64; arguments and errors are those of `as_array`."""
    return as_array(values, what).astype(np.float64, copy=False)
