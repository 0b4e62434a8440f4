"""Decide what a pickle may do here: build plain values, call nothing, and stay within its own size.

Layer: algorithms (standard library only). Python's own unpickler is not used: it reserves memory for whatever index a file names, and
hashing a deeply nested tuple key ends the process. This machine knows the opcodes that plain data needs and no others.

Invariants, each matched by a test in `tests/unit/test_pickle_machine.py` and `tests/property/test_pickle_laws.py`:

- for plain data, `run_pickle(pickle.dumps(value, protocol))` equals `value`, for protocols 2 to 5;
- a global that is not in `Globals` is refused by its name; nothing of it is imported;
- memory grows with the bytes read, never with a number found in them;
- reading a sequence of tensors by the pattern `_TENSOR` gives what reading it opcode by opcode gives.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from rl_dump.errors import DumpError

__all__ = ["Globals", "PersistentLoad", "Rebuild", "run_pickle"]

Globals: TypeAlias = Mapping[tuple[str, str], Any]
"""What a global stands for, by module and name. A callable value may be called with the arguments the file gives it."""
PersistentLoad: TypeAlias = Callable[[Any], Any]
"""Turns a persistent id, as torch writes for storages, into a value."""

_GET, _PUT, _INT = rb"(?:h.|j....)", rb"(?:q.|r....)", rb"(?:K.|M..|J...[\0-\x7f])"
# One contiguous tensor of one dimension, as torch writes it: 22 opcodes, 40,000 times in a batch. Groups: start (rebuild, "storage", class),
# storage key (literal and its memo number, or memo number), device, length, offset, size, start of the hooks, memo number of the tensor.
_TENSOR = re.compile(
    b"(%(get)s\\(\\(%(get)s%(get)s)(?:X(.)\\0\\0\\0([0-9]+)(%(put)s)|(%(get)s))(%(get)s)(%(int)s)t%(put)sQ"
    b"(%(int)s)(%(int)s)\x85%(put)sK\x01\x85%(put)s\x89(%(get)s)\\)R%(put)st%(put)sR(%(put)s)" % {b"get": _GET, b"put": _PUT, b"int": _INT},
    re.DOTALL,
)
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
_MAX_INTEGER_BYTES = 256
_KEY_TYPES = (str, int, float, bytes, type(None))

_U2, _U4, _U8, _I4, _F8 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<i"), struct.Struct(">d")

# Lists of numbers are most of a rollout dump: runs of one opcode are decoded at once. Each: pattern, record, position of the number.
_RUNS = {
    ord("G"): (re.compile(rb"(?:G.{8}){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", ">f8")])),
    ord("K"): (re.compile(rb"(?:K.){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", "u1")])),
    ord("M"): (re.compile(rb"(?:M..){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", "<u2")])),
    ord("J"): (re.compile(rb"(?:J....){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", "<i4")])),
}


class Rebuild:
    """Mark the global that rebuilds a tensor, so that a whole tensor can be read at once.

    Args:
        function: called with storage, offset, shape, strides and more, as torch's `_rebuild_tensor_v2` is.
        contiguous: called with storage, offset and size, for a tensor of one dimension without gaps.
    """

    __slots__ = ("contiguous", "function")

    def __init__(self, function: Callable[..., Any], contiguous: Callable[[Any, int, int], Any]) -> None:
        self.function = function
        self.contiguous = contiguous

    def __call__(self, *arguments: Any) -> Any:
        """Rebuild one tensor."""
        return self.function(*arguments)


def run_pickle(data: bytes, *, known: Globals, persistent_load: PersistentLoad, where: str, patterns: bool = True) -> Any:
    """Return the value a pickle describes.

    Args:
        data: the pickle, of protocol 2 to 5.
        known: the globals it may name.
        persistent_load: called with each persistent id.
        where: what to name in errors, usually the file.
        patterns: read whole tensors at once where the pickle has torch's own pattern; the result is the same without, later.

    Raises:
        DumpError: the pickle is damaged, names a global that is not known (by module and name), or uses an opcode plain data does not need.
    """
    machine = _Machine(data, known, persistent_load, where, patterns=patterns)
    try:
        return machine.run()
    except DumpError:
        raise
    except _Elided:
        return run_pickle(data, known=known, persistent_load=persistent_load, where=where, patterns=False)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error, RecursionError, MemoryError, AttributeError) as error:
        msg = f"{where}: the pickle is damaged at byte {machine.position} ({type(error).__name__})"
        raise DumpError(msg) from error


class _Stop(Exception):  # noqa: N818 - the machine's regular end, not an error
    """End the loop of the machine."""


class _Elided(Exception):  # noqa: N818 - a change of plan, not an error
    """Tell that the pickle uses a value inside of a tensor again, which reading by pattern does not keep."""


class _Global:
    """Stand for a global on the stack, so that it can be called but not be mistaken for data."""

    __slots__ = ("name", "target")

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target


class _Machine:
    """Run one pickle on a stack of plain values."""

    def __init__(self, data: bytes, known: Globals, persistent_load: PersistentLoad, where: str, *, patterns: bool) -> None:
        self._data = data
        self._known = known
        self._persistent_load = persistent_load
        self._where = where
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._patterns = patterns
        self._elided = False
        self._storages: dict[Any, Any] = {}
        self._starts: dict[bytes, _Global | None] = {}
        self.position = 0

    def run(self) -> Any:
        data, handlers, runs = self._data, _HANDLERS, _RUNS
        try:
            while True:
                at = self.position
                opcode = data[at]
                self.position = at + 1
                # Memo traffic is half of every file that torch writes.
                if opcode == 0x71:  # BINPUT
                    self._put(data[at + 1], self._stack[-1])
                    self.position = at + 2
                elif opcode == 0x72:  # LONG_BINPUT
                    self._put(_U4.unpack_from(data, at + 1)[0], self._stack[-1])
                    self.position = at + 5
                elif opcode in (0x68, 0x6A):  # BINGET, LONG_BINGET
                    self._get(opcode, at)
                elif opcode in runs:
                    self._numbers(opcode, at)
                else:
                    handler = handlers.get(opcode)
                    if handler is None:
                        self._refuse(opcode)
                    else:
                        handler(self)
        except _Stop:
            value = self._pop()
        if isinstance(value, _Global):
            msg = f"{self._where}: holds {value.name} instead of data"
            raise DumpError(msg)
        return value

    def _put(self, number: int, value: Any) -> None:
        if number in self._memo:
            # No pickler numbers twice; whoever does shall get what the opcodes say.
            self._starts.clear()
        self._memo[number] = value

    def _get(self, opcode: int, at: int) -> None:
        number, width = (self._data[at + 1], 2) if opcode == 0x68 else (_U4.unpack_from(self._data, at + 1)[0], 5)
        try:
            value = self._memo[number]
        except KeyError:
            if self._elided:
                raise _Elided from None
            raise
        if value.__class__ is _Global and value.target.__class__ is Rebuild and self._patterns and self._tensor(value, at):
            return
        self._stack.append(value)
        self.position = at + width

    def _tensor(self, rebuild: _Global, at: int) -> bool:
        """Read one tensor by its pattern; False if the bytes do not have it."""
        match = _TENSOR.match(self._data, at)
        if match is None:
            return False
        start, key_size, key, key_put, key_get, device, length, offset, size, hooks, put = match.groups()
        known = start + hooks
        if known in self._starts:
            kind = self._starts[known]
        else:
            kind = self._starts[known] = self._storage_class(known)
        if kind is None or (key is not None and key_size[0] != len(key)):
            return False
        decode = int.from_bytes
        if key is None:
            name = self._memo.get(decode(key_get[1:], "little"))
        else:
            name = key.decode("ascii")
            self._put(decode(key_put[1:], "little"), name)
        token = ("storage", kind.target, name, self._memo.get(decode(device[1:], "little")), decode(length[1:], "little"))
        storage = self._storages.get(token)
        if storage is None:
            storage = self._storages[token] = self._call(self._persistent_load, token)
        tensor = self._call(rebuild.target.contiguous, storage, decode(offset[1:], "little"), decode(size[1:], "little"))
        self._stack.append(tensor)
        self._put(decode(put[1:], "little"), tensor)
        self._elided = True
        self.position = match.end()
        return True

    def _storage_class(self, known: bytes) -> _Global | None:
        """Return the storage class that the start of a tensor names, if it is a storage and its hooks an OrderedDict's global."""
        numbers = [int.from_bytes(token, "little") for pair in _GETS.findall(known) for token in pair if token]
        _, word, kind, ordered = (self._memo.get(number) for number in numbers)
        fits = word == "storage" and isinstance(kind, _Global) and isinstance(ordered, _Global) and ordered.name == "collections.OrderedDict"
        return kind if fits and isinstance(kind, _Global) else None

    def _refuse(self, opcode: int) -> None:
        msg = f"{self._where}: opcode 0x{opcode:02x} at byte {self.position - 1} is not one that plain data needs; refused"
        raise DumpError(msg)

    def _numbers(self, opcode: int, at: int) -> None:
        pattern, record = _RUNS[opcode]
        width = record.itemsize
        following = at + width
        if following < len(self._data) and self._data[following] == opcode:
            match = pattern.match(self._data, at)
            if match is not None:
                self._stack.extend(np.frombuffer(match.group(), record)["value"].tolist())
                self.position = match.end()
                return
        raw = self._take(width - 1)
        self._stack.append(_F8.unpack(raw)[0] if opcode == 0x47 else int.from_bytes(raw, "little", signed=opcode == 0x4A))

    def _take(self, count: int) -> bytes:
        start = self.position
        if count > len(self._data) - start:
            msg = f"{self._where}: the pickle ends at byte {len(self._data)}, inside a value of {count} bytes"
            raise DumpError(msg)
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
        raise _Stop

    def proto(self) -> None:
        version = self._take(1)[0]
        if not 2 <= version <= 5:
            msg = f"{self._where}: pickle protocol {version}; 2 to 5 can be read"
            raise DumpError(msg)

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def long1(self) -> None:
        self._integer(self._take(1)[0])

    def long4(self) -> None:
        self._integer(_I4.unpack(self._take(4))[0])

    def _integer(self, size: int) -> None:
        if not 0 <= size <= _MAX_INTEGER_BYTES:
            msg = f"{self._where}: an integer of {size} bytes; refused"
            raise DumpError(msg)
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def unicode1(self) -> None:
        self._stack.append(self._take(self._take(1)[0]).decode("utf-8", "surrogatepass"))

    def unicode4(self) -> None:
        self._stack.append(self._take(_U4.unpack(self._take(4))[0]).decode("utf-8", "surrogatepass"))

    def unicode8(self) -> None:
        self._stack.append(self._take(_U8.unpack(self._take(8))[0]).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self._stack.append(self._take(self._take(1)[0]))

    def bytes4(self) -> None:
        self._stack.append(self._take(_U4.unpack(self._take(4))[0]))

    def bytes8(self) -> None:
        self._stack.append(self._take(_U8.unpack(self._take(8))[0]))

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_dict(self) -> None:
        self._stack.append({})

    def empty_tuple(self) -> None:
        self._stack.append(())

    def tuple_mark(self) -> None:
        self._stack_tuple(self._pop_mark())

    def tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def tuple2(self) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def tuple3(self) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _stack_tuple(self, items: list[Any]) -> None:
        self._stack.append(tuple(items))

    def append(self) -> None:
        value = self._pop()
        self._list().append(value)

    def appends(self) -> None:
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            msg = f"{self._where}: items for a {type(target).__name__}, not a list; refused"
            raise DumpError(msg)
        return target

    def setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def setitems(self) -> None:
        self._update(self._pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            msg = f"{self._where}: items for a {type(target).__name__}, not a dict; refused"
            raise DumpError(msg)
        keys = items[::2]
        for key in keys if set(map(type, keys)) != {str} else ():
            # A nested tuple as a key would be hashed level by level on the C stack.
            flat = isinstance(key, tuple) and all(isinstance(part, _KEY_TYPES) for part in key)
            if not isinstance(key, _KEY_TYPES) and not flat:
                msg = f"{self._where}: a {type(key).__name__} as a key; refused"
                raise DumpError(msg)
        target.update(zip(keys, items[1::2], strict=True))

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def global_(self) -> None:
        module = self._line()
        self._stack.append(self._resolve(module, self._line()))

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(self._resolve(module, name))

    def _resolve(self, module: object, name: object) -> _Global:
        if not isinstance(module, str) or not isinstance(name, str):
            msg = f"{self._where}: a global without a name; refused"
            raise DumpError(msg)
        if (module, name) not in self._known:
            shown = f"{module}.{name}"[:200]
            msg = f"{self._where}: holds an object of {shown}, which is not plain data; refused, and nothing was run"
            raise DumpError(msg)
        return _Global(f"{module}.{name}", self._known[module, name])

    def reduce(self) -> None:
        arguments, target = self._pop(), self._stack[-1]
        if not isinstance(target, _Global) or not callable(target.target) or type(arguments) is not tuple:
            msg = f"{self._where}: a call of {getattr(target, 'name', type(target).__name__)} that plain data does not need; refused"
            raise DumpError(msg)
        self._stack[-1] = self._call(target.target, *(part.target if isinstance(part, _Global) else part for part in arguments))

    def build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        set_state = getattr(type(target), "set_pickled_state", None)
        if set_state is None:
            msg = f"{self._where}: state for a {type(target).__name__}; refused"
            raise DumpError(msg)
        self._call(set_state, target, state)

    def persistent_id(self) -> None:
        token = self._pop()
        plain = tuple(part.target if isinstance(part, _Global) else part for part in token) if isinstance(token, tuple) else token
        self._stack.append(self._call(self._persistent_load, plain))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except DumpError as error:
            msg = f"{self._where}: {error}"
            raise DumpError(msg) from error


_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    ord("."): _Machine.stop,
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    0x8A: _Machine.long1,
    0x8B: _Machine.long4,
    0x8C: _Machine.unicode1,
    ord("X"): _Machine.unicode4,
    0x8D: _Machine.unicode8,
    ord("C"): _Machine.bytes1,
    ord("B"): _Machine.bytes4,
    0x8E: _Machine.bytes8,
    ord("]"): _Machine.empty_list,
    ord("}"): _Machine.empty_dict,
    ord(")"): _Machine.empty_tuple,
    ord("t"): _Machine.tuple_mark,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    0x94: _Machine.memoize,
    ord("c"): _Machine.global_,
    0x93: _Machine.stack_global,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent_id,
}
