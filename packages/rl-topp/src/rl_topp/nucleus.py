"""`NucleusSet`: the ids that the sampler could have picked, for many tokens, in CSR form.

Axes: T tokens, nnz kept ids of all of them, K tokens taken.

Invariants: a `NucleusSet` that exists is well-formed (see `validation.find_problems`); its arrays
are its own and read-only; no operation changes an existing set, whichever threads use it; appending
n pieces one after the other costs amortised linear time, because the newest set of a chain grows in
a buffer whose unused end it alone may fill (`append_buffer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_topp.append_buffer import GrowingRecord, RecordArrays
from rl_topp.errors import NucleusError
from rl_topp.validation import (
    NucleusStatus,
    OnTruncated,
    as_indices,
    as_integers,
    check_count,
    check_on_truncated,
    find_problems,
    refuse_first,
    row_of_each_id,
)

__all__ = ["NucleusSet", "NucleusStatus", "OnTruncated"]


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
    """int32 [nnz]: kept token ids in [0, vocab_size), one token's set after the other.

    No repeats inside a set; the order inside it is free.
    """
    offsets: npt.NDArray[np.int64]
    """int64 [T+1]: token t owns `ids[offsets[t]:offsets[t+1]]`; from 0 to nnz, never decreasing."""
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
        self._fill((ids, offsets, status), int(self.vocab_size), None)

    def _fill(self, arrays: RecordArrays, vocab_size: int, growing: GrowingRecord | None) -> None:
        # Past the guard of a frozen dataclass, which is complete only after this.
        for name, array in zip(("ids", "offsets", "status"), arrays, strict=True):
            object.__setattr__(self, name, _read_only(array))
        object.__setattr__(self, "vocab_size", vocab_size)
        object.__setattr__(self, "_growing", growing)

    @classmethod
    def _trusted(
        cls, arrays: RecordArrays, vocab_size: int, growing: GrowingRecord | None = None
    ) -> NucleusSet:
        """Build from arrays out of well-formed sets: no second check of O(nnz log nnz)."""
        self = object.__new__(cls)
        self._fill(arrays, vocab_size, growing)
        return self

    @classmethod
    def empty(cls, *, vocab_size: int) -> NucleusSet:
        """Return the set of no tokens, the start of a chain of `append`."""
        return cls._uniform(0, NucleusStatus.NOT_SAMPLED, vocab_size)

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
            as_integers(() if entry is None else entry, np.int32, f"kept ids of token {t}")
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
        if vocab_size is None and not sets:
            raise NucleusError("concat of no sets needs vocab_size")
        expected = sets[0].vocab_size if vocab_size is None else vocab_size
        NucleusError.raise_if(
            [
                f"set {position} has vocab_size {piece.vocab_size}, expected {expected}"
                for position, piece in enumerate(sets)
                if piece.vocab_size != expected
            ]
        )
        if not sets:
            return cls.empty(vocab_size=expected)
        ids = np.concatenate([piece.ids for piece in sets])
        offsets = _offsets_of(np.concatenate([piece.set_sizes for piece in sets]))
        status = np.concatenate([piece.status for piece in sets])
        return cls._trusted((ids, offsets, status), expected)

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
        return self._trusted(grown, self.vocab_size, growing)

    def slice(self, start: int, stop: int) -> NucleusSet:
        """Return the tokens [start, stop); the ids are a view, nothing but T+1 offsets is copied.

        Raises:
            NucleusError: not 0 <= start <= stop <= T.
        """
        if not 0 <= start <= stop <= len(self):
            raise NucleusError(f"slice [{start}, {stop}) does not lie in [0, {len(self)})")
        low, high = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start : stop + 1] - low
        return self._trusted(
            (self.ids[low:high], offsets, self.status[start:stop]), self.vocab_size
        )

    def take(self, tokens: npt.ArrayLike) -> NucleusSet:
        """Return the named tokens in the given order; repeats allowed.

        Args:
            tokens: integers [K] in [0, T).

        Raises:
            NucleusError: an index lies outside; the message names its position.
        """
        index_K = as_indices(tokens, len(self), "tokens")
        counts_K = self.set_sizes[index_K]
        offsets = _offsets_of(counts_K)
        # Place of every taken id: its place inside its own set, shifted to where that set starts.
        source = np.arange(offsets[-1], dtype=np.int64) + np.repeat(
            self.offsets[index_K] - offsets[:-1], counts_K
        )
        return self._trusted((self.ids[source], offsets, self.status[index_K]), self.vocab_size)

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
        """Compare array by array: a set with its ids in another order is another record."""
        if not isinstance(other, NucleusSet):
            return NotImplemented
        return self.vocab_size == other.vocab_size and all(
            np.array_equal(*pair) for pair in zip(self._arrays, other._arrays, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # A set that comes out of a pickle is checked, and starts a chain of its own.
        ids, offsets, status = self._arrays
        return partial(
            NucleusSet, ids=ids, offsets=offsets, status=status, vocab_size=self.vocab_size
        ), ()

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
        rows = row_of_each_id(self.offsets)
        found = np.zeros(len(self), np.bool_)
        found[rows[self.ids == wanted[rows]]] = True
        refuse_first(
            outside,
            lambda token: (
                f"token {token} sampled id {wanted[token]}, outside the vocabulary [0,"
                f" {self.vocab_size})"
            ),
        )
        refuse_first(
            (self.status == NucleusStatus.KEPT) & ~found,
            lambda token: (
                f"token {token} sampled id {wanted[token]}, which is not among its"
                f" {self.set_sizes[token]} kept ids"
            ),
        )


def _offsets_of(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
