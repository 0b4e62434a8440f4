"""What each opcode of a pickle does, for the few opcodes that plain data needs.

Nothing is imported and no class is made: a global is a name until `Globals` says what it
stands for, and a call is refused unless `Globals` gives it something to call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rl_dump.errors import DumpError

__all__ = ["HANDLERS", "Globals", "KnownGlobal", "PersistentLoad", "PickleStack", "Stop"]

Globals: TypeAlias = Mapping[tuple[str, str], Any]
"""What a global stands for, by module and name.

A callable value may be called with the arguments the file gives it.
"""
PersistentLoad: TypeAlias = Callable[[Any], Any]
"""Turns a persistent id, as torch writes for storages, into a value."""

_MAX_INTEGER_BYTES = 256
_KEY_TYPES = (str, int, float, bytes, type(None))
_U4, _U8, _I4 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<i")


class Stop(Exception):  # noqa: N818 - the machine's regular end, not an error
    """The end of the machine's loop."""


class KnownGlobal:
    """A global on the stack, which can be called but not be mistaken for data."""

    __slots__ = ("name", "target")

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target


class PickleStack:
    """The stack, the marks and the memo of one pickle, and what each opcode does to them.

    Args:
        data: the pickle.
        known: the globals it may name.
        persistent_load: called with each persistent id.
        where: what to name in errors.
    """

    def __init__(
        self, data: bytes, known: Globals, persistent_load: PersistentLoad, where: str
    ) -> None:
        self._data = data
        self._known = known
        self._persistent_load = persistent_load
        self._where = where
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self.position = 0
        """Where the next byte is read."""

    def refuse(self, opcode: int) -> None:
        """Refuse an opcode that is not in `HANDLERS`."""
        raise DumpError(
            f"{self._where}: opcode 0x{opcode:02x} at byte {self.position - 1} is not one that"
            " plain data needs; refused"
        )

    def _take(self, count: int) -> bytes:
        start = self.position
        if count > len(self._data) - start:
            raise DumpError(
                f"{self._where}: the pickle ends at byte {len(self._data)}, inside a value of"
                f" {count} bytes"
            )
        self.position = start + count
        return self._data[start : self.position]

    def _line(self) -> str:
        end = self._data.index(b"\n", self.position)
        text = self._data[self.position : end].decode("utf-8")
        self.position = end + 1
        return text

    def _pop(self) -> Any:
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    # Handlers, one per opcode, in the order of the table below.

    def stop(self) -> None:
        """End the pickle."""
        raise Stop

    def proto(self) -> None:
        """Check the protocol."""
        version = self._take(1)[0]
        if not 2 <= version <= 5:
            raise DumpError(f"{self._where}: pickle protocol {version}; 2 to 5 can be read")

    def frame(self) -> None:
        """Skip the length of a frame."""
        self._take(8)

    def mark(self) -> None:
        """Start a run of items."""
        self._marks.append(self._stack)
        self._stack = []

    def none(self) -> None:
        """Push None."""
        self._stack.append(None)

    def true(self) -> None:
        """Push True."""
        self._stack.append(True)

    def false(self) -> None:
        """Push False."""
        self._stack.append(False)

    def long1(self) -> None:
        """Push an integer of up to 255 bytes."""
        self._integer(self._take(1)[0])

    def long4(self) -> None:
        """Push an integer with a four-byte length."""
        self._integer(_I4.unpack(self._take(4))[0])

    def _integer(self, size: int) -> None:
        if not 0 <= size <= _MAX_INTEGER_BYTES:
            raise DumpError(f"{self._where}: an integer of {size} bytes; refused")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def unicode1(self) -> None:
        """Push a text of up to 255 bytes."""
        self._stack.append(self._take(self._take(1)[0]).decode("utf-8", "surrogatepass"))

    def unicode4(self) -> None:
        """Push a text with a four-byte length."""
        self._stack.append(
            self._take(_U4.unpack(self._take(4))[0]).decode("utf-8", "surrogatepass")
        )

    def unicode8(self) -> None:
        """Push a text with an eight-byte length."""
        self._stack.append(
            self._take(_U8.unpack(self._take(8))[0]).decode("utf-8", "surrogatepass")
        )

    def bytes1(self) -> None:
        """Push up to 255 bytes."""
        self._stack.append(self._take(self._take(1)[0]))

    def bytes4(self) -> None:
        """Push bytes with a four-byte length."""
        self._stack.append(self._take(_U4.unpack(self._take(4))[0]))

    def bytes8(self) -> None:
        """Push bytes with an eight-byte length."""
        self._stack.append(self._take(_U8.unpack(self._take(8))[0]))

    def empty_list(self) -> None:
        """Push a new list."""
        self._stack.append([])

    def empty_dict(self) -> None:
        """Push a new dict."""
        self._stack.append({})

    def empty_tuple(self) -> None:
        """Push the empty tuple."""
        self._stack.append(())

    def tuple_mark(self) -> None:
        """Make a tuple of the items since the mark."""
        self._stack_tuple(self._pop_mark())

    def tuple1(self) -> None:
        """Make a tuple of the top item."""
        self._stack[-1] = (self._stack[-1],)

    def tuple2(self) -> None:
        """Make a tuple of the top two items."""
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def tuple3(self) -> None:
        """Make a tuple of the top three items."""
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _stack_tuple(self, items: list[Any]) -> None:
        self._stack.append(tuple(items))

    def append(self) -> None:
        """Append the top item to the list below."""
        value = self._pop()
        self._list().append(value)

    def appends(self) -> None:
        """Append the items since the mark to the list below."""
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise DumpError(
                f"{self._where}: items for a {type(target).__name__}, not a list; refused"
            )
        return target

    def setitem(self) -> None:
        """Set one key of the dict below."""
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def setitems(self) -> None:
        """Set the keys since the mark in the dict below."""
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise DumpError(
                f"{self._where}: items for a {type(target).__name__}, not a dict; refused"
            )
        keys = items[::2]
        for key in keys if set(map(type, keys)) != {str} else ():
            # A nested tuple as a key would be hashed level by level on the C stack.
            flat = isinstance(key, tuple) and all(isinstance(part, _KEY_TYPES) for part in key)
            if not isinstance(key, _KEY_TYPES) and not flat:
                raise DumpError(f"{self._where}: a {type(key).__name__} as a key; refused")
        target.update(zip(keys, items[1::2], strict=True))

    def memoize(self) -> None:
        """Number the top item."""
        self._memo[len(self._memo)] = self._stack[-1]

    def global_(self) -> None:
        """Push a global named on two lines."""
        module = self._line()
        self._stack.append(self._resolve(module, self._line()))

    def stack_global(self) -> None:
        """Push a global named by the top two items."""
        name, module = self._pop(), self._pop()
        self._stack.append(self._resolve(module, name))

    def _resolve(self, module: object, name: object) -> KnownGlobal:
        if not isinstance(module, str) or not isinstance(name, str):
            raise DumpError(f"{self._where}: a global without a name; refused")
        if (module, name) not in self._known:
            shown = f"{module}.{name}"[:200]
            raise DumpError(
                f"{self._where}: holds an object of {shown}, which is not plain data; refused, and"
                " nothing was run"
            )
        return KnownGlobal(f"{module}.{name}", self._known[module, name])

    def reduce(self) -> None:
        """Call a known global."""
        arguments, target = self._pop(), self._stack[-1]
        if (
            not isinstance(target, KnownGlobal)
            or not callable(target.target)
            or type(arguments) is not tuple
        ):
            raise DumpError(
                f"{self._where}: a call of {getattr(target, 'name', type(target).__name__)} that"
                " plain data does not need; refused"
            )
        self._stack[-1] = self._call(
            target.target,
            *(part.target if isinstance(part, KnownGlobal) else part for part in arguments),
        )

    def build(self) -> None:
        """Give the item below its state."""
        state, target = self._pop(), self._stack[-1]
        set_state = getattr(type(target), "set_pickled_state", None)
        if set_state is None:
            raise DumpError(f"{self._where}: state for a {type(target).__name__}; refused")
        self._call(set_state, target, state)

    def persistent_id(self) -> None:
        """Push what a persistent id stands for."""
        token = self._pop()
        plain = (
            tuple(part.target if isinstance(part, KnownGlobal) else part for part in token)
            if isinstance(token, tuple)
            else token
        )
        self._stack.append(self._call(self._persistent_load, plain))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except DumpError as error:
            raise DumpError(f"{self._where}: {error}") from error


HANDLERS: dict[int, Callable[[PickleStack], None]] = {
    ord("."): PickleStack.stop,
    0x80: PickleStack.proto,
    0x95: PickleStack.frame,
    ord("("): PickleStack.mark,
    ord("N"): PickleStack.none,
    0x88: PickleStack.true,
    0x89: PickleStack.false,
    0x8A: PickleStack.long1,
    0x8B: PickleStack.long4,
    0x8C: PickleStack.unicode1,
    ord("X"): PickleStack.unicode4,
    0x8D: PickleStack.unicode8,
    ord("C"): PickleStack.bytes1,
    ord("B"): PickleStack.bytes4,
    0x8E: PickleStack.bytes8,
    ord("]"): PickleStack.empty_list,
    ord("}"): PickleStack.empty_dict,
    ord(")"): PickleStack.empty_tuple,
    ord("t"): PickleStack.tuple_mark,
    0x85: PickleStack.tuple1,
    0x86: PickleStack.tuple2,
    0x87: PickleStack.tuple3,
    ord("a"): PickleStack.append,
    ord("e"): PickleStack.appends,
    ord("s"): PickleStack.setitem,
    ord("u"): PickleStack.setitems,
    0x94: PickleStack.memoize,
    ord("c"): PickleStack.global_,
    0x93: PickleStack.stack_global,
    ord("R"): PickleStack.reduce,
    ord("b"): PickleStack.build,
    ord("Q"): PickleStack.persistent_id,
}
