"""What a pickle may do here: build plain values, call nothing, and stay within its own size.

Python's own unpickler reserves memory for whatever index a file names, and hashing a deeply nested
tuple key ends the process. This machine knows only the opcodes that plain data needs.

Invariants, each matched by a test in `tests/unit/test_pickle_machine.py` and
`tests/property/test_pickle_laws.py`:

- for plain data, `run_pickle(pickle.dumps(value, protocol))` equals `value`, for protocols 2 to 5;
- a global that is not in `Globals` is refused by its name; nothing of it is imported;
- memory grows with the bytes read, never with a number found in them;
- reading tensors by the pattern `_TENSOR` gives what reading opcode by opcode gives.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from rl_dump.archive.pickle_stack import (
    HANDLERS,
    Globals,
    KnownGlobal,
    PersistentLoad,
    PickleStack,
    Stop,
)
from rl_dump.errors import DumpError

__all__ = ["Rebuild", "run_pickle"]

_GET, _PUT, _INT = rb"(?:h.|j....)", rb"(?:q.|r....)", rb"(?:K.|M..|J...[\0-\x7f])"
# One contiguous tensor of one dimension, as torch writes it: 22 opcodes, 40,000 times in a batch.
# Groups: start (rebuild, "storage", class), storage key (literal and its memo number, or memo
# number), device, length, offset, size, start of the hooks, memo number of the tensor.
_TENSOR = re.compile(
    b"(%(get)s\\(\\(%(get)s%(get)s)(?:X(.)\\0\\0\\0([0-9]+)(%(put)s)|(%(get)s))"
    b"(%(get)s)(%(int)s)t%(put)sQ"
    b"(%(int)s)(%(int)s)\x85%(put)sK\x01\x85%(put)s\x89(%(get)s)\\)R%(put)st%(put)sR(%(put)s)"
    % {b"get": _GET, b"put": _PUT, b"int": _INT},
    re.DOTALL,
)
_GETS = re.compile(rb"h(.)|j(....)", re.DOTALL)
_U4, _F8 = struct.Struct("<I"), struct.Struct(">d")

# Lists of numbers are most of a rollout dump: runs of one opcode are decoded at once. Each:
# pattern, record, position of the number.
_RUNS = {
    ord("G"): (
        re.compile(rb"(?:G.{8}){2,}", re.DOTALL),
        np.dtype([("op", "u1"), ("value", ">f8")]),
    ),
    ord("K"): (re.compile(rb"(?:K.){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", "u1")])),
    ord("M"): (re.compile(rb"(?:M..){2,}", re.DOTALL), np.dtype([("op", "u1"), ("value", "<u2")])),
    ord("J"): (
        re.compile(rb"(?:J....){2,}", re.DOTALL),
        np.dtype([("op", "u1"), ("value", "<i4")]),
    ),
}


class Rebuild:
    """The global that rebuilds a tensor, marked so that a whole tensor can be read at once.

    Args:
        function: called with storage, offset, shape, strides and more, as torch's
            `_rebuild_tensor_v2` is.
        contiguous: called with storage, offset and size, for a tensor of one dimension without
            gaps.
    """

    __slots__ = ("contiguous", "function")

    def __init__(
        self, function: Callable[..., Any], contiguous: Callable[[Any, int, int], Any]
    ) -> None:
        self.function = function
        self.contiguous = contiguous

    def __call__(self, *arguments: Any) -> Any:
        """Rebuild one tensor."""
        return self.function(*arguments)


def run_pickle(
    data: bytes,
    *,
    known: Globals,
    persistent_load: PersistentLoad,
    where: str,
    patterns: bool = True,
) -> Any:
    """Return the value a pickle describes.

    Args:
        data: the pickle, of protocol 2 to 5.
        known: the globals it may name.
        persistent_load: called with each persistent id.
        where: what to name in errors, usually the file.
        patterns: read whole tensors at once where the pickle has torch's own pattern; the result is
            the same without, later.

    Raises:
        DumpError: the pickle is damaged, names a global that is not known (by module and name), or
            uses an opcode plain data does not need.
    """
    machine = _Machine(data, known, persistent_load, where, patterns=patterns)
    try:
        return machine.run()
    except DumpError:
        raise
    except _Elided:
        return run_pickle(
            data, known=known, persistent_load=persistent_load, where=where, patterns=False
        )
    except (
        IndexError,
        KeyError,
        ValueError,
        TypeError,
        OverflowError,
        struct.error,
        RecursionError,
        MemoryError,
        AttributeError,
    ) as error:
        raise DumpError(
            f"{where}: the pickle is damaged at byte {machine.position} ({type(error).__name__})"
        ) from error


class _Elided(Exception):  # noqa: N818 - a change of plan, not an error
    """A value inside of a tensor that is used again; reading by pattern does not keep it."""


class _Machine(PickleStack):
    """One run of one pickle; runs of numbers and whole tensors are read at once."""

    def __init__(
        self,
        data: bytes,
        known: Globals,
        persistent_load: PersistentLoad,
        where: str,
        *,
        patterns: bool,
    ) -> None:
        super().__init__(data, known, persistent_load, where)
        self._patterns = patterns
        self._elided = False
        self._storages: dict[Any, Any] = {}
        self._starts: dict[bytes, KnownGlobal | None] = {}

    def run(self) -> Any:
        data, handlers, runs = self._data, HANDLERS, _RUNS
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
                        self.refuse(opcode)
                    else:
                        handler(self)
        except Stop:
            value = self._pop()
        if isinstance(value, KnownGlobal):
            raise DumpError(f"{self._where}: holds {value.name} instead of data")
        return value

    def _put(self, number: int, value: Any) -> None:
        if number in self._memo:
            # No pickler numbers twice; whoever does shall get what the opcodes say.
            self._starts.clear()
        self._memo[number] = value

    def _get(self, opcode: int, at: int) -> None:
        number, width = (
            (self._data[at + 1], 2)
            if opcode == 0x68
            else (_U4.unpack_from(self._data, at + 1)[0], 5)
        )
        try:
            value = self._memo[number]
        except KeyError:
            if self._elided:
                raise _Elided from None
            raise
        if (
            value.__class__ is KnownGlobal
            and value.target.__class__ is Rebuild
            and self._patterns
            and self._tensor(value, at)
        ):
            return
        self._stack.append(value)
        self.position = at + width

    def _tensor(self, rebuild: KnownGlobal, at: int) -> bool:
        """Read one tensor by its pattern; False if the bytes do not have it."""
        match = _TENSOR.match(self._data, at)
        if match is None:
            return False
        start, key_size, key, key_put, key_get, device, length, offset, size, hooks, put = (
            match.groups()
        )
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
        token = (
            "storage",
            kind.target,
            name,
            self._memo.get(decode(device[1:], "little")),
            decode(length[1:], "little"),
        )
        storage = self._storages.get(token)
        if storage is None:
            storage = self._storages[token] = self._call(self._persistent_load, token)
        tensor = self._call(
            rebuild.target.contiguous,
            storage,
            decode(offset[1:], "little"),
            decode(size[1:], "little"),
        )
        self._stack.append(tensor)
        self._put(decode(put[1:], "little"), tensor)
        self._elided = True
        self.position = match.end()
        return True

    def _storage_class(self, known: bytes) -> KnownGlobal | None:
        """Return the storage class that a tensor names, None if it is not written as torch does."""
        numbers = [
            int.from_bytes(token, "little")
            for pair in _GETS.findall(known)
            for token in pair
            if token
        ]
        _, word, kind, ordered = (self._memo.get(number) for number in numbers)
        fits = (
            word == "storage"
            and isinstance(kind, KnownGlobal)
            and isinstance(ordered, KnownGlobal)
            and ordered.name == "collections.OrderedDict"
        )
        return kind if fits and isinstance(kind, KnownGlobal) else None

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
        self._stack.append(
            _F8.unpack(raw)[0]
            if opcode == 0x47
            else int.from_bytes(raw, "little", signed=opcode == 0x4A)
        )
