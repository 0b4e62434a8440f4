"""Decide how Python values without a column of their own are written as JSON and read back the same.

Layer: records. JSON alone loses tuples, bytes, arrays, non-finite floats and keys that are not strings; each gets a one-key object whose
key starts with `$`. A plain dict with such a key is written as `$map`, so every value has exactly one reading.

Invariant, matched by `tests/property/test_document_laws.py`: `loads(dumps(value))` equals `value` in type and bits.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_dump.errors import DumpError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_DEPTH", "dumps", "loads"]

MAX_DEPTH = 64
"""Deepest nesting written or read: deeper is a cycle or an attack, not data."""


def dumps(value: object, *, what: str = "value") -> str:
    """Write `value` as one line of JSON.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, nested up to `MAX_DEPTH`.
        what: what to name in an error.

    Raises:
        DumpError: a value of another type, or nested too deeply.
    """
    return json.dumps(_pack(value, what, 0), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def loads(text: str | bytes, *, what: str = "value") -> Any:
    """Read what `dumps` wrote.

    Raises:
        DumpError: not JSON, nested too deeply, or a tag that cannot be read.
    """
    try:
        return _unpack(json.loads(text), what, 0)
    except DumpError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        msg = f"{what}: not a document this package wrote ({type(error).__name__}: {error})"
        raise DumpError(msg) from error


def _pack(value: object, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        msg = f"{what}: nested deeper than {MAX_DEPTH} levels; does it contain itself?"
        raise DumpError(msg)
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return _pack_dict(value, what, depth)
    if isinstance(value, list):
        return [_pack(item, what, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, what, depth + 1) for item in value]}
    if isinstance(value, bytes):
        return {"$bytes": _encode(value)}
    if isinstance(value, np.generic):
        return {"$scalar": _dtype_name(value.dtype, what), "data": _encode(value.tobytes())}
    if isinstance(value, np.ndarray):
        return _pack_array(value, what)
    msg = f"{what}: cannot write a {type(value).__module__}.{type(value).__qualname__}; pass plain Python values or numpy arrays"
    raise DumpError(msg)


def _pack_dict(value: dict[Any, Any], what: str, depth: int) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {str(key): _pack(item, f"{what}.{key}", depth + 1) for key, item in value.items()}
    return {"$map": [[_pack(key, what, depth + 1), _pack(item, f"{what}[{key!r}]", depth + 1)] for key, item in value.items()]}


def _pack_array(value: np.ndarray[Any, Any], what: str) -> Any:
    name = _dtype_name(value.dtype, what)
    if value.dtype.kind in "iub":
        # Integers stay readable: schedules and shard layouts are looked at by people.
        return {"$array": name, "shape": list(value.shape), "values": value.reshape(-1).tolist()}
    return {"$array": name, "shape": list(value.shape), "data": _encode(np.ascontiguousarray(value).tobytes())}


def _dtype_name(dtype: np.dtype[Any], what: str) -> str:
    if dtype.kind not in "iufb":
        msg = f"{what}: cannot write arrays of dtype {dtype}; booleans, integers and floats only"
        raise DumpError(msg)
    return dtype.name


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unpack(value: Any, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        msg = f"{what}: nested deeper than {MAX_DEPTH} levels"
        raise DumpError(msg)
    if isinstance(value, list):
        return [_unpack(item, what, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    for tag, read in _TAGS.items():
        if tag in value:
            return read(value, what, depth)
    return {key: _unpack(item, what, depth + 1) for key, item in value.items()}


def _dtype(name: object) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in "iufb":
        msg = f"dtype {name!r} is not a boolean, integer or float"
        raise ValueError(msg)
    return dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype


def _read_array(value: dict[str, Any], _what: str, _depth: int) -> Any:
    dtype = _dtype(value["$array"])
    if "values" in value:
        return np.array(value["values"], dtype).reshape(value["shape"])
    return np.frombuffer(bytearray(base64.b64decode(value["data"], validate=True)), dtype).reshape(value["shape"])


def _read_float(value: dict[str, Any], what: str, _depth: int) -> Any:
    number = float(value["$float"])
    if math.isfinite(number):
        msg = f"{what}: tagged float {number} is finite"
        raise DumpError(msg)
    return number


_TAGS: dict[str, Callable[[dict[str, Any], str, int], Any]] = {
    "$tuple": lambda value, what, depth: tuple(_unpack(item, what, depth + 1) for item in value["$tuple"]),
    "$map": lambda value, what, depth: {_unpack(key, what, depth + 1): _unpack(item, what, depth + 1) for key, item in value["$map"]},
    "$bytes": lambda value, _what, _depth: base64.b64decode(value["$bytes"], validate=True),
    "$scalar": lambda value, _what, _depth: np.frombuffer(base64.b64decode(value["data"], validate=True), _dtype(value["$scalar"]))[0],
    "$array": _read_array,
    "$float": _read_float,
}
