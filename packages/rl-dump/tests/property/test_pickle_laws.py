"""The pickle machine agrees with Python's unpickler on plain data, never with a hostile file."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_dump import DumpError
from rl_dump.archive.pickle_machine import run_pickle
from rl_dump.archive.tensors import archive_globals, storage_of

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(max_size=300),
    st.binary(max_size=300),
)
keys = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 3),
    st.none(),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=30,
)


def machine(data: bytes, **options: Any) -> Any:
    return run_pickle(
        data, known=archive_globals(), persistent_load=storage_of, where="file", **options
    )


@given(values, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_reads_as_python_reads_it(value: object, protocol: int) -> None:
    found = machine(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value)


@given(
    st.lists(
        st.one_of(st.floats(allow_nan=False), st.integers(0, 2**40), st.integers(-5, 5)),
        max_size=40,
    ),
    st.sampled_from([2, 4]),
)
def test_runs_of_numbers_read_as_single_ones_do(value: list[float], protocol: int) -> None:
    found = machine(pickle.dumps(value, protocol))
    assert found == value
    assert list(map(type, found)) == list(map(type, value))


@given(values, st.data())
def test_a_changed_byte_gives_data_or_a_dump_error(value: object, data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(value, 2))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        machine(bytes(raw))
    except DumpError as error:
        assert "\n" not in str(error)


@given(st.binary(max_size=200))
def test_any_bytes_give_data_or_a_dump_error(raw: bytes) -> None:
    try:
        machine(b"\x80\x02" + raw + b".")
    except DumpError:
        return


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_shared_and_recursive_structure_is_built_as_python_builds_it(protocol: int) -> None:
    shared = [1, 2]
    value = {"a": shared, "b": shared, "t": (shared, (shared,))}
    found = machine(pickle.dumps(value, protocol))
    assert found["a"] is found["b"] is found["t"][0]
    loop: list[Any] = []
    loop.append(loop)
    again = machine(pickle.dumps(loop, protocol))
    assert again[0] is again
