"""What a pickle may not do: name code, run code, or take more than its own size."""

from __future__ import annotations

import collections
import os
import pickle
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from rl_dump import DumpError
from rl_dump.archive.pickle_machine import run_pickle
from rl_dump.archive.tensors import archive_globals, storage_of


def machine(data: bytes, **options: Any) -> Any:
    return run_pickle(
        data, known=archive_globals(), persistent_load=storage_of, where="file.pt", **options
    )


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def _refused_classes() -> list[tuple[object, str]]:
    import builtins
    import functools
    import subprocess

    return [
        (Evil(os.system, ("touch {target}",)), "posix.system"),
        (Evil(subprocess.Popen, (["touch", "{target}"],)), "subprocess.Popen"),
        (Evil(builtins.eval, ("open('{target}', 'w')",)), "builtins.eval"),
        (Evil(builtins.getattr, ("", "join")), "builtins.getattr"),
        (Evil(functools.partial, (print,)), "functools.partial"),
        (collections.deque([1]), "collections.deque"),
        (range(3), "builtins.range"),
        (1j, "builtins.complex"),
        (ValueError("x"), "builtins.ValueError"),
        (slice(1), "builtins.slice"),
    ]


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize(("value", "name"), _refused_classes())
def test_hostile_classes_are_refused_by_name_and_nothing_runs(
    value: Any, name: str, protocol: int, tmp_path: Path
) -> None:
    target = tmp_path / "ran"
    if isinstance(value, Evil) and "{target}" in repr(value.call):
        call = (
            value.call[0],
            tuple(
                (
                    [part.replace("{target}", str(target)) for part in argument]
                    if isinstance(argument, list)
                    else argument.replace("{target}", str(target))
                )
                for argument in value.call[1]
            ),
        )
        value = Evil(*call)
    with pytest.raises(
        DumpError,
        match=(
            rf"file\.pt: holds an object of {name}, which is not plain data; refused, and nothing"
            r" was run"
        ),
    ):
        machine(pickle.dumps({"samples": [value]}, protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged at byte 0"),
        (b"\x80\x02", "damaged at byte"),
        (b"\x80\x09N.", "pickle protocol 9"),
        (b"\x80\x02(i", "opcode 0x69"),
        (b"\x80\x022.", "opcode 0x32"),
        (b"\x80\x020.", "opcode 0x30"),
        (b"\x80\x02\x82\x01.", "opcode 0x82"),
        (b"\x80\x02P1\n.", "opcode 0x50"),
        (b"\x80\x02N)\x81.", "opcode 0x81"),
        (b"\x80\x02h\x07.", "damaged at byte"),
        (b"\x80\x02X\xff\xff\xff\x7f.", "ends at byte 8, inside a value of 2147483647 bytes"),
        (
            b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b".",
            "inside a value of 9223372036854775808 bytes",
        ),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "an integer of 2147483647 bytes"),
        (b"\x80\x02\x8b\xff\xff\xff\xff.", "an integer of -1 bytes"),
        (b"\x80\x02N\x85K\x01K\x02s.", "items for a tuple, not a dict"),
        (b"\x80\x02}K\x01a.", "items for a dict, not a list"),
        (b"\x80\x02}]K\x01s.", "a list as a key"),
        (b"\x80\x02})\x85\x85K\x01s.", "a tuple as a key"),
        (b"\x80\x02ccollections\nOrderedDict\n.", "holds collections.OrderedDict instead of data"),
        (
            b"\x80\x02ccollections\nOrderedDict\n]R.",
            "a call of collections.OrderedDict that plain data does not need",
        ),
        (b"\x80\x02K\x01)R.", "a call of int"),
        (b"\x80\x02]}b.", "state for a list"),
        (b"\x80\x02K\x01Q.", "a persistent id that is not a storage"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "holds an object of os.system"),
        (b"\x80\x04K\x01K\x02\x93.", "a global without a name"),
        (
            b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
            "file.pt: a call of _codecs.encode",
        ),
        (b"\x80\x02ccollections\nOrderedDict\n(]tR.", None),
        (b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.", "not a boolean, integer or float"),
    ],
)
def test_pickles_that_are_not_data_are_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(DumpError, match=message) as failure:
        machine(data)
    assert "\n" not in str(failure.value)


def test_a_memo_number_reserves_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert machine(b"\x80\x02Nr\xff\xff\xff\xff.") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_deep_nesting_ends_no_process() -> None:
    deep = b"\x80\x02)" + b"\x85" * 200_000 + b"."
    found = machine(deep)
    assert type(found) is tuple
    with pytest.raises(DumpError, match="as a key"):
        machine(b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.")


def test_a_long_list_of_numbers_is_read_in_bulk() -> None:
    value = [float(number) for number in range(1_000_000)]
    data = pickle.dumps(value, 2)
    start = time.process_time()
    assert machine(data) == value
    assert time.process_time() - start < 5


def test_ordered_dicts_come_as_dicts_in_order() -> None:
    value = collections.OrderedDict([("b", 1), ("a", 2)])
    found = machine(pickle.dumps(value, 2))
    assert type(found) is dict
    assert list(found.items()) == [("b", 1), ("a", 2)]


def test_bytes_read_in_every_protocol() -> None:
    for protocol in (2, 3, 4, 5):
        for value in (b"", b"\x00\xff", b"x" * 300):
            assert machine(pickle.dumps(value, protocol)) == value
