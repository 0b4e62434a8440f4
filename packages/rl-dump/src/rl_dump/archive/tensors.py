"""How a pickled tensor becomes a numpy array without torch: a view of the mapped file.

Torch writes a tensor as a storage (bytes of one zip entry) with offset, shape and strides; several
tensors may share one.

Invariants, each matched by a test in `tests/unit/test_torch_archive.py`:

- no array reaches outside of its storage, whatever offset and strides the file gives;
- bfloat16 comes as float32, exactly: its bits are the upper half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.archive.pickle_machine import Rebuild
from rl_dump.archive.pickle_stack import Globals
from rl_dump.errors import DumpError

__all__ = [
    "STORAGE_DTYPES",
    "NumpyArray",
    "StorageRef",
    "TensorRef",
    "archive_globals",
    "storage_of",
    "tensor_array",
]

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UInt16Storage": "uint16",
    "UInt32Storage": "uint32",
    "UInt64Storage": "uint64",
}
"""Logical dtype of torch's storage classes that a dump may hold."""

_TORCH_DTYPES = {
    **{name: name for name in STORAGE_DTYPES.values()},
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
}
_MAX_EXPANDED = 1 << 27


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage of the archive."""

    key: str
    """Name of its entry below `data/`."""
    dtype: str | None
    """Logical dtype of its elements; None for an untyped one, whose length is in bytes."""
    length: int
    """Elements, or bytes if untyped."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that has not been read."""

    storage: StorageRef
    """Where its elements lie."""
    dtype: str
    """Logical dtype."""
    offset: int
    """First element, in elements of the storage."""
    shape: tuple[int, ...]
    """Sizes of its dimensions."""
    strides: tuple[int, ...]
    """Steps between elements of each dimension, in elements."""

    @property
    def num_elements(self) -> int:
        """Count the elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def extent(self) -> int:
        """Count the elements if no dimension were empty: what the shape costs a reader."""
        count = 1
        for size in self.shape:
            count *= max(size, 1)
        return count


@dataclass(slots=True)
class NumpyArray:
    """A numpy array of a pickle: made empty, then given its state."""

    array: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """The array, once the state is set."""

    def set_pickled_state(self, state: Any) -> None:
        """Set version, shape, dtype, order and bytes, as numpy writes them.

        Raises:
            DumpError: the state is not that of a numeric array.
        """
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _NumpyDtype):
            raise DumpError("a numpy array that holds something other than numbers; refused")
        _, shape, dtype, fortran, raw = state
        self.array = _array_of(raw, dtype, shape, "F" if fortran else "C")


class _NumpyDtype:
    """A numpy dtype of a pickle."""

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(name)
        if self.dtype.kind not in "iufb":
            raise DumpError(f"numpy dtype {name!r} is not a boolean, integer or float; refused")

    def set_pickled_state(self, state: Any) -> None:
        """Set the byte order; every other part of the state is for dtypes that are refused."""
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.dtype = self.dtype.newbyteorder(state[1]) if state[1] in "<>" else self.dtype


def archive_globals() -> Globals:
    """Return the globals that a dump may name, and what each stands for here."""
    known: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): _ordered_dict,
        ("torch", "Size"): lambda sizes=(): tuple(sizes),
        ("torch.storage", "UntypedStorage"): _StorageType(None),
        ("torch", "UntypedStorage"): _StorageType(None),
        ("torch._utils", "_rebuild_tensor_v2"): Rebuild(_rebuild_tensor, _contiguous),
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("_codecs", "encode"): _encode_latin1,
        ("__builtin__", "bytes"): _empty_bytes,
        ("builtins", "bytes"): _empty_bytes,
        ("numpy", "dtype"): lambda name, *_: _NumpyDtype(name),
        ("numpy", "ndarray"): "numpy.ndarray",
    }
    for name, dtype in STORAGE_DTYPES.items():
        known["torch", name] = _StorageType(dtype)
    for name, dtype in _TORCH_DTYPES.items():
        known["torch", name] = _TorchDtype(dtype)
    for core in ("numpy.core", "numpy._core"):
        known[f"{core}.multiarray", "scalar"] = _numpy_scalar
        known[f"{core}.multiarray", "_reconstruct"] = lambda *_: NumpyArray()
        known[f"{core}.numeric", "_frombuffer"] = lambda raw, dtype, shape, order: NumpyArray(
            _array_of(raw, dtype, shape, order)
        )
    return known


def storage_of(token: Any) -> StorageRef:
    """Return the storage a persistent id names: `("storage", class, key, device, length)`.

    Raises:
        DumpError: the id is something else.
    """
    if (
        not isinstance(token, tuple)
        or len(token) != 5
        or token[0] != "storage"
        or not isinstance(token[1], _StorageType)
    ):
        raise DumpError("a persistent id that is not a storage; refused")
    _, kind, key, _, length = token
    if not isinstance(key, str) or type(length) is not int or length < 0:
        raise DumpError("a storage without a name or a length; refused")
    return _storage(kind.dtype, key, length)


def tensor_array(
    tensor: TensorRef, read_storage: Callable[[StorageRef], NDArray[Any]], *, swapped: bool = False
) -> NDArray[Any]:
    """Return a tensor's values, without copying where its layout allows it.

    Args:
        tensor: what to read.
        read_storage: returns a storage's bytes as uint8 [bytes].
        swapped: the bytes of an element stand highest first.

    Returns:
        Array of the tensor's shape; float32 for bfloat16.

    Raises:
        DumpError: the tensor reaches outside of its storage.
    """
    dtype = np.dtype(np.uint16 if tensor.dtype == "bfloat16" else tensor.dtype)
    raw = read_storage(tensor.storage)
    elements = raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)
    count = tensor.num_elements
    reach = tensor.offset + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    )
    if count and reach >= len(elements):
        raise DumpError(
            f"a tensor of shape {tensor.shape} reaches element {reach} of a storage of"
            f" {len(elements)}"
        )
    if tensor.extent > max(len(elements), _MAX_EXPANDED):
        raise DumpError(
            f"a tensor of shape {tensor.shape} expands a storage of {len(elements)} elements;"
            " refused"
        )
    if not count:
        array: NDArray[Any] = np.zeros(tensor.shape, dtype)
    else:
        # Where a dimension has one element, its stride leads nowhere and may be any number.
        strides = [
            stride * dtype.itemsize if size > 1 else 0
            for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        ]
        array = np.lib.stride_tricks.as_strided(
            elements[tensor.offset :], tensor.shape, strides, writeable=False
        )
    if swapped:
        array = array.byteswap()
    return _bfloat16_to_float32(array) if tensor.dtype == "bfloat16" else array


def _bfloat16_to_float32(array: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


@functools.lru_cache(maxsize=4096)
def _storage(dtype: str | None, key: str, length: int) -> StorageRef:
    # One record per storage: tensors of one storage are told by identity.
    return StorageRef(key, dtype, length)


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str | None
    """Numpy name or `bfloat16`; None of an untyped storage."""


@dataclass(frozen=True, slots=True)
class _TorchDtype:
    name: str
    """Numpy name or `bfloat16`."""


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorRef:
    return _tensor(
        storage, storage.dtype if isinstance(storage, StorageRef) else None, offset, shape, strides
    )


def _contiguous(storage: Any, offset: int, size: int) -> TensorRef:
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise DumpError("a tensor without a storage or a dtype; refused")
    return TensorRef(storage, storage.dtype, offset, (size,), (1,))


def _rebuild_typed(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    *_: Any,
) -> TensorRef:
    return _tensor(
        storage, dtype.name if isinstance(dtype, _TorchDtype) else None, offset, shape, strides
    )


def _tensor(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> TensorRef:
    sizes = (offset, *shape, *strides)
    if (
        not isinstance(storage, StorageRef)
        or dtype is None
        or len(shape) != len(strides)
        or len(shape) > 16
    ):
        raise DumpError("a tensor without a storage, a dtype or a shape; refused")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise DumpError("a tensor with sizes that are not whole numbers; refused")
    return TensorRef(storage, dtype, offset, tuple(shape), tuple(strides))


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    # Pickle fills it by SETITEMS; a plain dict keeps the order as well.
    if items != ():
        raise DumpError("an OrderedDict with constructor arguments; refused")
    return {}


def _encode_latin1(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise DumpError("a call of _codecs.encode for anything but bytes; refused")
    return text.encode("latin1")


def _empty_bytes(*arguments: Any) -> bytes:
    if arguments:
        raise DumpError("a call of bytes with arguments; refused")
    return b""


def _numpy_scalar(dtype: Any, raw: Any = b"") -> np.generic:
    if not isinstance(dtype, _NumpyDtype):
        raise DumpError("a numpy scalar that is not a number; refused")
    value: np.generic = _array_of(raw, dtype, (1,), "C")[0]
    return value


def _array_of(raw: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if (
        not isinstance(raw, bytes)
        or not isinstance(dtype, _NumpyDtype)
        or not isinstance(shape, tuple)
        or order not in ("C", "F")
    ):
        raise DumpError("a numpy array that holds something other than plain numbers; refused")
    flat = np.frombuffer(raw, dtype.dtype)
    native = flat.astype(dtype.dtype.newbyteorder("="), copy=False)
    return native.reshape(shape, order=order)
