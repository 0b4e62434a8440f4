"""`NucleusSet`: the ids that the sampler could have picked, for many tokens, in CSR form.

Invariants: a `NucleusSet` that exists is well-formed (see
`validation.find_problems`); its arrays are its own and read-only; no operation changes an existing
set, whichever threads use it; appending n pieces one after the other costs amortised linear time,
because the newest set of a chain grows in a buffer whose unused end it alone may fill (`growth`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rl_topp.contract import (
    ARRAY_DTYPES,
    CONTRACT,
    MINOR,
    NucleusSetDocument,
    check_header,
    declaration_problems,
)
from rl_topp.errors import NucleusError
from rl_topp.growth import GrowingRecord, RecordArrays
from rl_topp.validation import (
    as_integers,
    check_count,
    check_on_truncated,
    find_problems,
    is_integer,
    row_of_each_id,
)

__all__ = ["NucleusSet", "NucleusStatus", "OnTruncated"]

OnTruncated = Literal["mask", "full"]
"""What a token with an incomplete set is worth: `mask` = no log-prob, `full` = the log-prob over the vocabulary."""


class NucleusStatus(IntEnum):
    """What is known about the set of one token."""

    KEPT = 0
    """The kept set is recorded and complete."""
    NO_FILTER = 1
    """No filter applied: the sampler chose from the whole vocabulary; no ids stored."""
    NOT_SAMPLED = 2
    """A tool or environment token: no log-prob exists, its loss mask is 0; no ids stored."""
    TRUNCATED = 3
    """A filter applied, but transport lost part of the set; the ids that arrived (possibly none) are no basis for a log-prob."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NucleusSet:
    """Kept sets of T tokens.

    The arrays it is built from are copied, so what the caller does to them later changes nothing
    here.

    Example: a token kept {5, 9}, a tool token, a token sampled without a filter:

        NucleusSet(ids=[5, 9], offsets=[0, 2, 2, 2], status=[0, 2, 1], vocab_size=10)

    Raises:
        NucleusError: the arrays do not form a record; every problem is listed, each with its token.
    """

    ids: npt.NDArray[np.int32]
    """int32 [nnz]: kept token ids in [0, vocab_size), one token's set after the other, no repeats inside a set, order free."""
    offsets: npt.NDArray[np.int64]
    """int64 [T+1]: token t owns `ids[offsets[t]:offsets[t+1]]`; starts at 0, never decreases, ends at nnz."""
    status: npt.NDArray[np.uint8]
    """uint8 [T]: a `NucleusStatus` per token."""
    vocab_size: int
    """Number of token ids the sampler chose from (without padding of the embedding)."""
    _growing: GrowingRecord | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        # Copied before they are checked: nobody else can change what was found to be right.
        ids = as_integers(self.ids, np.int32, "ids").copy()
        offsets = as_integers(self.offsets, np.int64, "offsets").copy()
        status = as_integers(self.status, np.uint8, "status").copy()
        NucleusError.raise_if(find_problems(ids, offsets, status, self.vocab_size))
        self._fill(ids, offsets, status, int(self.vocab_size), None)

    def _fill(
        self,
        ids: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        status: npt.NDArray[np.uint8],
        vocab_size: int,
        growing: GrowingRecord | None,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "ids", _read_only(ids))
        set_field(self, "offsets", _read_only(offsets))
        set_field(self, "status", _read_only(status))
        set_field(self, "vocab_size", vocab_size)
        set_field(self, "_growing", growing)

    @classmethod
    def _trusted(
        cls,
        ids: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
        status: npt.NDArray[np.uint8],
        vocab_size: int,
        growing: GrowingRecord | None = None,
    ) -> NucleusSet:
        """Build from arrays that come out of well-formed sets: no second check of O(nnz log nnz)."""
        self = object.__new__(cls)
        self._fill(ids, offsets, status, vocab_size, growing)
        return self

    # Construction
    # ----------------------------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls, *, vocab_size: int) -> NucleusSet:
        """Return the set of no tokens, the start of a chain of `append`."""
        return cls(
            ids=np.zeros(0, np.int32),
            offsets=np.zeros(1, np.int64),
            status=np.zeros(0, np.uint8),
            vocab_size=vocab_size,
        )

    @classmethod
    def from_lists(
        cls, kept: Sequence[Sequence[int] | npt.NDArray[Any] | None], *, vocab_size: int
    ) -> NucleusSet:
        """Build from one entry per sampled token: its kept ids, or None where no filter applied.

        Example: `from_lists([[5, 9], None], vocab_size=10)` has status [0, 1] and offsets [0, 2,
        2].

        Raises:
            NucleusError: an entry is empty, leaves the vocabulary or repeats an id; the message
                names the token.
        """
        kept = list(kept)
        rows = [
            (
                np.zeros(0, np.int32)
                if entry is None
                else as_integers(entry, np.int32, f"kept ids of token {t}")
            )
            for t, entry in enumerate(kept)
        ]
        status = np.array(
            [NucleusStatus.NO_FILTER if entry is None else NucleusStatus.KEPT for entry in kept],
            np.uint8,
        )
        return cls(
            ids=np.concatenate(rows) if rows else np.zeros(0, np.int32),
            offsets=_offsets_of(np.array([row.size for row in rows], np.int64)),
            status=status,
            vocab_size=vocab_size,
        )

    @classmethod
    def unfiltered(cls, num_tokens: int, *, vocab_size: int) -> NucleusSet:
        """Return `num_tokens` tokens sampled from the whole vocabulary (status 1)."""
        return cls._uniform(num_tokens, NucleusStatus.NO_FILTER, vocab_size)

    @classmethod
    def not_sampled(cls, num_tokens: int, *, vocab_size: int) -> NucleusSet:
        """Return `num_tokens` tool or environment tokens (status 2)."""
        return cls._uniform(num_tokens, NucleusStatus.NOT_SAMPLED, vocab_size)

    @classmethod
    def _uniform(cls, num_tokens: int, status: NucleusStatus, vocab_size: int) -> NucleusSet:
        check_count(num_tokens, "num_tokens")
        return cls(
            ids=np.zeros(0, np.int32),
            offsets=np.zeros(num_tokens + 1, np.int64),
            status=np.full(num_tokens, status, np.uint8),
            vocab_size=vocab_size,
        )

    @classmethod
    def concat(cls, sets: Sequence[NucleusSet], *, vocab_size: int | None = None) -> NucleusSet:
        """Return the tokens of all `sets`, in order, in one copy.

        Args:
            sets: any number of sets over one vocabulary.
            vocab_size: needed only when `sets` may be empty.

        Raises:
            NucleusError: no sets and no `vocab_size`, or two vocabulary sizes; the message names
                the positions.
        """
        if not sets and vocab_size is None:
            raise NucleusError("concat of no sets needs vocab_size")
        expected = sets[0].vocab_size if vocab_size is None else vocab_size
        for position, piece in enumerate(sets):
            if piece.vocab_size != expected:
                raise NucleusError(
                    f"set {position} has vocab_size {piece.vocab_size}, expected {expected}"
                )
        if not sets:
            return cls.empty(vocab_size=expected)
        counts = np.concatenate([np.diff(piece.offsets) for piece in sets])
        ids = np.concatenate([piece.ids for piece in sets])
        return cls._trusted(
            ids, _offsets_of(counts), np.concatenate([piece.status for piece in sets]), expected
        )

    # Operations
    # ------------------------------------------------------------------------------------------------------------------

    def append(self, other: NucleusSet) -> NucleusSet:
        """Return this set followed by `other`; both stay as they are.

        A chain `s = s.append(turn)` over n turns copies each id a constant number of times on
        average. Appending to a set that was already appended to, in this thread or another, copies
        that set once.

        Raises:
            NucleusError: the vocabulary sizes differ.
        """
        if other.vocab_size != self.vocab_size:
            raise NucleusError(
                f"cannot append a set over {other.vocab_size} ids to one over {self.vocab_size}"
            )
        growing = self._growing
        grown = None if growing is None else growing.extend(len(self), other._arrays)
        if growing is None or grown is None:
            growing = GrowingRecord(self._arrays)
            grown = growing.extend(len(self), other._arrays)
            assert grown is not None, "a chain that nobody else knows has no other owner"
        return self._trusted(*grown, self.vocab_size, growing)

    def slice(self, start: int, stop: int) -> NucleusSet:
        """Return the tokens [start, stop); the ids are a view, nothing but T+1 offsets is copied.

        Raises:
            NucleusError: not 0 <= start <= stop <= T.
        """
        if not 0 <= start <= stop <= len(self):
            raise NucleusError(f"slice [{start}, {stop}) does not lie in [0, {len(self)})")
        low, high = self.offsets[start], self.offsets[stop]
        return self._trusted(
            self.ids[low:high],
            self.offsets[start : stop + 1] - low,
            self.status[start:stop],
            self.vocab_size,
        )

    def take(self, tokens: npt.ArrayLike) -> NucleusSet:
        """Return the named tokens in the given order; repeats allowed.

        Args:
            tokens: integers [K] in [0, T).

        Raises:
            NucleusError: an index lies outside; the message names its position.
        """
        index = as_integers(tokens, np.int64, "tokens")
        outside = np.flatnonzero((index < 0) | (index >= len(self)))
        if outside.size:
            raise NucleusError(
                f"tokens[{outside[0]}] is {index[outside[0]]}, outside [0, {len(self)})"
            )
        counts = np.diff(self.offsets)[index]
        offsets = _offsets_of(counts)
        # Position of every taken id: its place inside its own set, shifted to where that set starts
        # here.
        source = np.arange(offsets[-1], dtype=np.int64) + np.repeat(
            self.offsets[index] - offsets[:-1], counts
        )
        return self._trusted(self.ids[source], offsets, self.status[index], self.vocab_size)

    def sorted(self) -> NucleusSet:
        """Return the same sets with the ids of each token in ascending order: the form in which equal sets have equal arrays."""
        order = np.lexsort((self.ids, row_of_each_id(self.offsets)))
        return self._trusted(self.ids[order], self.offsets, self.status, self.vocab_size)

    # Questions
    # -------------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.status.size)

    def __getitem__(self, token: int) -> npt.NDArray[np.int32]:
        """Return the kept ids of one token, int32 [n]; negative indices count from the end."""
        if not -len(self) <= token < len(self):
            raise IndexError(f"token {token} of {len(self)}")
        token %= len(self)
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[np.int32]]:
        return (self[token] for token in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Compare array by array; sets that differ only in the order of their ids are equal after `sorted`."""
        if not isinstance(other, NucleusSet):
            return NotImplemented
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAY_DTYPES)
        return self.vocab_size == other.vocab_size and all(same)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.ids, self.offsets, self.status, self.vocab_size)

    @property
    def _arrays(self) -> RecordArrays:
        return self.ids, self.offsets, self.status

    @property
    def set_sizes(self) -> npt.NDArray[np.int64]:
        """int64 [T]: number of stored ids per token (0 for status 1 and 2)."""
        return np.diff(self.offsets)

    def scored_mask(self, *, on_truncated: OnTruncated = "mask") -> npt.NDArray[np.bool_]:
        """Return bool [T]: True where a log-prob exists; multiply the loss mask by it.

        Status 0 and 1 are scored, 2 never, 3 only with `on_truncated="full"`.

        Raises:
            NucleusError: an unknown `on_truncated`.
        """
        check_on_truncated(on_truncated)
        scored = self.status <= NucleusStatus.NO_FILTER
        return (
            scored | (self.status == NucleusStatus.TRUNCATED) if on_truncated == "full" else scored
        )

    def check_targets(self, targets: npt.ArrayLike) -> None:
        """Check that each sampled id lies in its set.

        Args:
            targets: integers [T]; entries at status 2 are not looked at.

        Raises:
            NucleusError: wrong length, an id outside the vocabulary, or a target missing from a
                complete set; names the token.
        """
        wanted = as_integers(targets, np.int64, "targets")
        if wanted.size != len(self):
            raise NucleusError(f"got {wanted.size} targets for {len(self)} tokens")
        outside = (self.status != NucleusStatus.NOT_SAMPLED) & (
            (wanted < 0) | (wanted >= self.vocab_size)
        )
        if outside.any():
            token = int(np.flatnonzero(outside)[0])
            raise NucleusError(
                f"token {token} sampled id {wanted[token]}, outside the vocabulary [0,"
                f" {self.vocab_size})"
            )
        rows = row_of_each_id(self.offsets)
        found = np.zeros(len(self), np.bool_)
        found[rows[self.ids == wanted[rows]]] = True
        missing = np.flatnonzero((self.status == NucleusStatus.KEPT) & ~found)
        if missing.size:
            token = int(missing[0])
            raise NucleusError(
                f"token {token} sampled id {wanted[token]}, which is not among its"
                f" {self.set_sizes[token]} kept ids"
            )

    # Document
    # --------------------------------------------------------------------------------------------------------------------

    def to_document(self) -> tuple[NucleusSetDocument, dict[str, npt.NDArray[Any]]]:
        """Return the JSON part of `nucleus-set.v1` and the arrays that lie beside it."""
        from importlib.metadata import version  # takes as long as the rest of the package

        arrays: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in ARRAY_DTYPES}
        document: NucleusSetDocument = {
            "contract": CONTRACT,
            "minor": MINOR,
            "producer": {"distribution": "rl-topp", "version": version("rl-topp")},
            "vocab_size": self.vocab_size,
            "arrays": {
                "ids": {"dtype": "int32", "shape": [self.ids.size]},
                "offsets": {"dtype": "int64", "shape": [self.offsets.size]},
                "status": {"dtype": "uint8", "shape": [self.status.size]},
            },
        }
        return document, arrays

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.ArrayLike]
    ) -> NucleusSet:
        """Read what `to_document` returned.

        Raises:
            UnsupportedContractError: another contract.
            NucleusError: a missing array or key, arrays that do not form a record, or others than
                the document declares.
        """
        check_header(document)
        missing = [
            f"array {name!r} is missing beside the document"
            for name in ARRAY_DTYPES
            if name not in arrays
        ]
        if not is_integer(document.get("vocab_size")):
            missing.append(f"vocab_size must be an integer, got {document.get('vocab_size')!r}")
        NucleusError.raise_if(missing)
        found = {name: as_integers(arrays[name], np.int64, name) for name in ARRAY_DTYPES}
        NucleusError.raise_if(
            declaration_problems(document, {name: array.size for name, array in found.items()})
        )
        return cls(**found, vocab_size=document["vocab_size"])


def _restore(
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    status: npt.NDArray[np.uint8],
    vocab_size: int,
) -> NucleusSet:
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


def _offsets_of(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
