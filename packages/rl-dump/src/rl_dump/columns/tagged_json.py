"""How Python values without a column of their own go through JSON and come back the same.

JSON alone loses tuples, bytes, arrays, non-finite floats and keys that are not strings; each gets a
one-key object whose key starts with `$`. A plain dict with such a key is written as `$map`, so
every value has exactly one reading.

Invariant, matched by `tests/property/test_tagged_json_laws.py`: `loads(dumps(value))` equals
`value` in type and bits.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_dump.errors import DumpError

__all__ = ["MAX_DEPTH", "Tensor", "check_text", "dumps", "loads"]

MAX_DEPTH = 64
"""Deepest nesting written or read: deeper is a cycle or an attack, not data."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A torch tensor that stands inside an object, without torch.

    A tensor that is a sample's whole value is a column of numbers; only those nested in dicts and
    lists come as this record.
    """

    array: np.ndarray[Any, Any]
    """Its values [...]; float32 for bfloat16."""
    dtype: str
    """Its logical dtype: a numpy name or `bfloat16`."""

    def __eq__(self, other: object) -> bool:
        """Say whether dtype, shape and bits are the same."""
        if not isinstance(other, Tensor):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self.array.dtype == other.array.dtype
            and self.array.shape == other.array.shape
            and self.array.tobytes() == other.array.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]


def dumps(value: object, *, what: str = "value") -> str:
    """Write `value` as one line of JSON.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars,
            nested up to `MAX_DEPTH`.
        what: what to name in an error.

    Raises:
        DumpError: a value of another type, nested too deeply, or text with a lone surrogate.
    """
    text = json.dumps(
        _pack(value, what, 0), allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )
    check_text(text, what=what)
    return text


def check_text(text: str, *, what: str) -> None:
    """Refuse text that UTF-8 cannot hold.

    Raises:
        DumpError: `text` has a lone surrogate, half of a character; names `what`.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DumpError(
            f"{what}: holds the lone surrogate U+{ord(text[error.start]):04X}, half of a character,"
            " which UTF-8 cannot hold; replace it"
        ) from error


def loads(text: str | bytes, *, what: str = "value") -> Any:
    """Read what `dumps` wrote.

    Raises:
        DumpError: not JSON, nested too deeply, or a tag that cannot be read.
    """
    try:
        return _unpack(json.loads(text), what, 0)
    except DumpError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        RecursionError,
        OverflowError,
        MemoryError,
        AttributeError,
    ) as error:
        raise DumpError(
            f"{what}: not a document this package wrote ({type(error).__name__}: {error})"
        ) from error


def _pack(value: object, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DumpError(f"{what}: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    for kind, pack in _PACKERS:
        if isinstance(value, kind):
            return pack(value, what, depth)
    raise DumpError(
        f"{what}: cannot write a {type(value).__module__}.{type(value).__qualname__}; pass plain"
        " Python values or numpy arrays"
    )


def _pack_dict(value: dict[Any, Any], what: str, depth: int) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {str(key): _pack(item, f"{what}.{key}", depth + 1) for key, item in value.items()}
    return {
        "$map": [
            [_pack(key, what, depth + 1), _pack(item, f"{what}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
    }


def _pack_items(value: list[Any] | tuple[Any, ...], what: str, depth: int) -> list[Any]:
    if set(map(type, value)) <= {int, str}:
        return list(value)
    return [_pack(item, what, depth + 1) for item in value]


def _pack_array(value: np.ndarray[Any, Any], what: str) -> Any:
    head = {"$array": _dtype_name(value.dtype, what), "shape": list(value.shape)}
    if value.dtype.kind in "iub":
        # Integers stay readable: schedules and shard layouts are looked at by people.
        return {**head, "values": value.reshape(-1).tolist()}
    return {**head, "data": _encode(np.ascontiguousarray(value).tobytes())}


def _dtype_name(dtype: np.dtype[Any], what: str) -> str:
    if dtype.kind not in "iufb":
        raise DumpError(
            f"{what}: cannot write arrays of dtype {dtype}; booleans, integers and floats only"
        )
    return dtype.name


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unpack(value: Any, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DumpError(f"{what}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        # Partitions and checksums are long lists of numbers: nothing in them needs a look.
        return (
            value
            if set(map(type, value)) <= _PLAIN
            else [_unpack(item, what, depth + 1) for item in value]
        )
    if not isinstance(value, dict):
        return value
    for tag, read in _TAGS.items():
        if tag in value:
            return read(value, what, depth)
    return {key: _unpack(item, what, depth + 1) for key, item in value.items()}


def _dtype(name: object) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in "iufb":
        raise ValueError(f"dtype {name!r} is not a boolean, integer or float")
    return dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype


def _read_array(value: dict[str, Any], _what: str, _depth: int) -> Any:
    dtype = _dtype(value["$array"])
    if "values" in value:
        return np.array(value["values"], dtype).reshape(value["shape"])
    return np.frombuffer(bytearray(base64.b64decode(value["data"], validate=True)), dtype).reshape(
        value["shape"]
    )


def _read_float(value: dict[str, Any], what: str, _depth: int) -> Any:
    number = float(value["$float"])
    if math.isfinite(number):
        raise DumpError(f"{what}: tagged float {number} is finite")
    return number


_PLAIN = {int, float, str, bool, type(None)}

# In this order: a numpy float64 is a Python float as well.
_PACKERS: tuple[tuple[type, Callable[[Any, str, int], Any]], ...] = (
    (
        np.generic,
        lambda value, what, _depth: {
            "$scalar": _dtype_name(value.dtype, what),
            "data": _encode(value.tobytes()),
        },
    ),
    (
        float,
        lambda value, _what, _depth: value if math.isfinite(value) else {"$float": repr(value)},
    ),
    (dict, _pack_dict),
    (list, _pack_items),
    (tuple, lambda value, what, depth: {"$tuple": _pack_items(value, what, depth)}),
    (bytes, lambda value, _what, _depth: {"$bytes": _encode(value)}),
    (np.ndarray, lambda value, what, _depth: _pack_array(value, what)),
    (
        Tensor,
        lambda value, what, _depth: {
            "$tensor": value.dtype,
            "array": _pack_array(value.array, what),
        },
    ),
)

_TAGS: dict[str, Callable[[dict[str, Any], str, int], Any]] = {
    "$tuple": lambda value, what, depth: tuple(
        _unpack(item, what, depth + 1) for item in value["$tuple"]
    ),
    "$map": lambda value, what, depth: {
        _unpack(key, what, depth + 1): _unpack(item, what, depth + 1) for key, item in value["$map"]
    },
    "$bytes": lambda value, _what, _depth: base64.b64decode(value["$bytes"], validate=True),
    "$scalar": lambda value, _what, _depth: np.frombuffer(
        base64.b64decode(value["data"], validate=True), _dtype(value["$scalar"])
    )[0],
    "$array": _read_array,
    "$tensor": lambda value, what, depth: Tensor(
        _read_array(value["array"], what, depth), str(value["$tensor"])
    ),
    "$float": _read_float,
}
