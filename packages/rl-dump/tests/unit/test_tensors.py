"""Tensors of an archive, without torch: what a pickle's globals stand for, and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_dump import DumpError
from rl_dump.archive.tensors import (
    NumpyArray,
    StorageRef,
    TensorRef,
    archive_globals,
    storage_of,
    tensor_array,
)

KNOWN: dict[tuple[str, str], Any] = dict(archive_globals())
FLOATS = KNOWN["torch", "FloatStorage"]
DTYPE = KNOWN["numpy", "dtype"]
SCALAR = KNOWN["numpy._core.multiarray", "scalar"]
BUFFER = KNOWN["numpy._core.numeric", "_frombuffer"]
TYPED = KNOWN["torch._utils", "_rebuild_tensor_v3"]
STORAGE = StorageRef("0", "float32", 6)


def elements(storage: StorageRef) -> np.ndarray[Any, Any]:
    """Return six floats, 0 to 5."""
    return np.arange(6, dtype=np.float32).view(np.uint8)


def test_a_storage_is_named_by_its_persistent_id() -> None:
    assert storage_of(("storage", FLOATS, "7", "cpu", 12)) == StorageRef("7", "float32", 12)
    for token in (
        None,
        ("storage", FLOATS, "7", "cpu"),
        ("module", FLOATS, "7", "cpu", 12),
        ("storage", "FloatStorage", "7", "cpu", 12),
    ):
        with pytest.raises(DumpError, match="a persistent id that is not a storage; refused"):
            storage_of(token)
    for key, length in ((7, 12), ("7", -1), ("7", True), ("7", 1.0)):
        with pytest.raises(DumpError, match="a storage without a name or a length; refused"):
            storage_of(("storage", FLOATS, key, "cpu", length))


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "expected"),
    [
        (0, (6,), (1,), [0, 1, 2, 3, 4, 5]),
        (1, (2, 2), (2, 1), [[1, 2], [3, 4]]),
        (0, (2, 3), (1, 2), [[0, 2, 4], [1, 3, 5]]),
        (5, (), (), 5),
        (2, (3,), (0,), [2, 2, 2]),
        (99, (0, 4), (1, 1), np.zeros((0, 4)).tolist()),
    ],
)
def test_views_are_what_their_strides_say(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], expected: object
) -> None:
    assert (
        tensor_array(TensorRef(STORAGE, "float32", offset, shape, strides), elements).tolist()
        == expected
    )


def test_a_view_outside_of_its_storage_is_refused() -> None:
    with pytest.raises(DumpError, match="reaches element 6 of a storage of 6"):
        tensor_array(TensorRef(STORAGE, "float32", 1, (6,), (1,)), elements)
    with pytest.raises(DumpError, match="expands a storage of 6 elements; refused"):
        tensor_array(TensorRef(STORAGE, "float32", 0, (1 << 28,), (0,)), elements)


def test_bytes_of_the_other_order_are_turned() -> None:
    swapped = tensor_array(
        TensorRef(STORAGE, "float32", 0, (6,), (1,)),
        lambda _: elements(STORAGE).view(np.float32).byteswap().view(np.uint8),
        swapped=True,
    )
    assert swapped.tolist() == [0, 1, 2, 3, 4, 5]


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    bits = (np.array([1.0, -2.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = tensor_array(
        TensorRef(StorageRef("0", "bfloat16", 2), "bfloat16", 0, (2,), (1,)),
        lambda _: bits.view(np.uint8),
    )
    assert (found.dtype, found.tolist()) == (np.dtype(np.float32), [1.0, -2.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("no storage", 0, (2,), (1,), False, {}, KNOWN["torch", "float32"]),
            "without a storage, a dtype or a shape",
        ),
        ((STORAGE, 0, (2,), (1,), False, {}, "float32"), "without a storage, a dtype or a shape"),
        (
            (STORAGE, 0, (2,), (1, 1), False, {}, KNOWN["torch", "float"]),
            "without a storage, a dtype or a shape",
        ),
        (
            (STORAGE, 0, (1,) * 17, (1,) * 17, False, {}, KNOWN["torch", "float"]),
            "without a storage, a dtype or a shape",
        ),
        (
            (STORAGE, -1, (2,), (1,), False, {}, KNOWN["torch", "float"]),
            "sizes that are not whole numbers",
        ),
        (
            (STORAGE, 0, (2.0,), (1,), False, {}, KNOWN["torch", "float"]),
            "sizes that are not whole numbers",
        ),
        (
            (STORAGE, 0, (1 << 62,), (1,), False, {}, KNOWN["torch", "float"]),
            "sizes that are not whole numbers",
        ),
    ],
)
def test_what_is_not_a_tensor_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DumpError, match=f"{message}; refused"):
        TYPED(*arguments)


def test_a_typed_tensor_takes_its_dtype_from_torchs_name() -> None:
    assert TYPED(STORAGE, 1, (2,), (1,), False, {}, KNOWN["torch", "half"]) == TensorRef(
        STORAGE, "float16", 1, (2,), (1,)
    )


def test_numpy_scalars_and_arrays_are_read_in_either_byte_order() -> None:
    big = DTYPE("f8")
    big.set_pickled_state((3, ">", None))
    assert SCALAR(big, np.array(1.5, ">f8").tobytes()) == 1.5
    array = BUFFER(np.array([1, 256], ">i4").tobytes(), _swapped("i4"), (2,), "C").array
    assert (array.dtype, array.tolist()) == (np.dtype(np.int32), [1, 256])
    fortran = NumpyArray()
    fortran.set_pickled_state(
        (1, (2, 2), DTYPE("i2"), True, np.array([1, 2, 3, 4], np.int16).tobytes())
    )
    assert fortran.array.tolist() == [[1, 3], [2, 4]]


def _swapped(name: str) -> Any:
    dtype = DTYPE(name)
    dtype.set_pickled_state((3, ">", None))
    return dtype


@pytest.mark.parametrize(
    "call",
    [
        lambda: DTYPE("O"),
        lambda: DTYPE("U4"),
        lambda: SCALAR("f8", b"\0" * 8),
        lambda: BUFFER("text", DTYPE("i4"), (2,), "C"),
        lambda: BUFFER(b"\0" * 8, DTYPE("i4"), [2], "C"),
        lambda: BUFFER(b"\0" * 8, DTYPE("i4"), (2,), "X"),
        lambda: NumpyArray().set_pickled_state((1, (2,), "i4", False, b"")),
        lambda: NumpyArray().set_pickled_state(None),
        lambda: KNOWN["collections", "OrderedDict"]([("a", 1)]),
        lambda: KNOWN["_codecs", "encode"]("text", "utf-8"),
        lambda: KNOWN["_codecs", "encode"](b"raw", "latin1"),
        lambda: KNOWN["builtins", "bytes"](1 << 40),
    ],
)
def test_what_is_not_plain_numbers_is_refused(call: Any) -> None:
    with pytest.raises(DumpError, match="refused"):
        call()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0, 1 << 61), (1, 1)), ((1 << 61, 0), (1, 1)), ((1 << 40, 0), (1, 1)), ((1 << 61,), (0,))],
)
def test_a_shape_that_no_file_can_hold_is_refused_even_if_it_is_empty(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(DumpError, match="expands a storage of 6 elements; refused"):
        tensor_array(TensorRef(STORAGE, "float32", 0, shape, strides), elements)


def test_the_stride_of_a_single_element_may_be_any_number() -> None:
    assert tensor_array(
        TensorRef(STORAGE, "float32", 2, (1, 2, 1), (1 << 61, 1, 1 << 61)), elements
    ).tolist() == [[[2.0], [3.0]]]
