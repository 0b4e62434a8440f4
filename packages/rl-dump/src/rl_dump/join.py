"""Decide which sample of a train dump is which sample of the rollout dump of the same batch.

A pair is never a guess: position, index and tokens must not contradict each other.

Invariants, each matched by a test in `tests/property/test_join_laws.py`:

- every row of either dump is in exactly one pair or in exactly one missing entry;
- the pairs do not depend on the order of rows in either file;
- paired samples have equal tokens where both dumps hold tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from rl_dump.contract import ROLLOUT_DUMP, TRAIN_DUMP
from rl_dump.errors import DumpError
from rl_dump.ragged import RaggedArray
from rl_dump.replay import REPLAY_KEY
from rl_dump.views import plan_dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from rl_dump.reader import Dump

__all__ = ["Join", "Method", "Missing", "Pair", "join"]

Method: TypeAlias = Literal["position", "index", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Name one sample in both dumps."""

    rollout_row: int
    """Row in the rollout dump, 0-based."""
    train_row: int
    """Row in the train dump, 0-based."""
    rollout_position: int | None
    """Position in the flattened rollout batch; None if neither dump holds one."""
    sample_index: int | None
    """The data source's number; None if neither dump holds one."""
    method: Method
    """What the two were matched by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Name a sample that only one of the dumps holds."""

    row: int
    """Row in the dump that holds it, 0-based."""
    rollout_position: int | None
    """Its position, if that dump holds one."""
    sample_index: int | None
    """Its index, if that dump holds one."""
    reason: str
    """Why the other dump does not hold it, as far as the dumps say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Hold the result of `join`; the three parts together name every row of both dumps once."""

    pairs: tuple[Pair, ...]
    """Samples in both, in the order of the train dump."""
    missing_in_rollout: tuple[Missing, ...]
    """Samples of the train dump that the rollout dump lacks."""
    missing_in_train: tuple[Missing, ...]
    """Samples of the rollout dump that the train dump lacks."""


def join(rollout_dump: Dump, train_dump: Dump) -> Join:
    """Match the samples of two dumps of one batch.

    By rollout position first, cross-checked with index and tokens; what is left, by index,
    cross-checked with tokens; what is left then, by tokens, where they are unique on both sides.

    Args:
        rollout_dump: a dump of contract `rollout-dump.v1`.
        train_dump: a dump of contract `train-dump.v2`, of the same batch.

    Raises:
        DumpError: the dumps are of other contracts or of different batches, or damaged.
    """
    _check(rollout_dump, train_dump)
    return _Matcher(_Side(rollout_dump), _Side(train_dump)).run()


def _check(rollout_dump: Dump, train_dump: Dump) -> None:
    for dump, contract in ((rollout_dump, ROLLOUT_DUMP), (train_dump, TRAIN_DUMP)):
        if dump.contract != contract:
            raise DumpError(
                f"{dump.path}: a {dump.contract}, join needs a {contract} here: rollout dump first,"
                " train dump second"
            )
    if rollout_dump.batch_id != train_dump.batch_id:
        raise DumpError(
            f"{rollout_dump.path} is batch {rollout_dump.batch_id}, {train_dump.path} is batch"
            f" {train_dump.batch_id}; join takes two dumps of one batch"
        )


_CROWD = 10_000
"""Most comparisons among samples of one key: a larger crowd cannot be told apart, and comparing it takes minutes."""


class _Side:
    """Hold one dump's keys: position, index, group and tokens of every row."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.rows = range(dump.num_samples)
        self.positions = _integers(dump, "rollout_position")
        self.indices = _integers(dump, "sample_index")
        self.rollouts = _integers(dump, "rollout_ids")
        tokens = dump.column("tokens", stored=True) if "tokens" in dump.fields else None
        self.tokens = tokens if isinstance(tokens, RaggedArray) else None
        self.removed = _flags(dump, "remove_sample")
        if dump.contract == ROLLOUT_DUMP and all(position is None for position in self.positions):
            # A rollout dump is written in rollout order: its row is the position.
            self.positions = list(self.rows)

    def token_key(self, row: int) -> Hashable:
        return None if self.tokens is None else self.tokens[row].astype(np.int64).tobytes()


class _Matcher:
    """Match rows of two sides, best evidence first."""

    def __init__(self, rollout: _Side, train: _Side) -> None:
        self.rollout, self.train = rollout, train
        self.matched: dict[int, tuple[int, Method]] = {}
        self.free = set(rollout.rows)
        self.noted = _Noted(
            train.dump, {position for position in train.positions if position is not None}
        )
        self.conflicts: dict[int, str] = {}
        self.ambiguous: dict[tuple[str, int], str] = {}

    def run(self) -> Join:
        self._match("position", lambda side, row: side.positions[row])
        self._match("index", lambda side, row: side.indices[row])
        self._match("tokens", lambda side, row: side.token_key(row))
        return self._result()

    def _match(self, method: Method, key: Callable[[_Side, int], Hashable]) -> None:
        waiting = [row for row in self.train.rows if row not in self.matched]
        theirs = _by_key(self.rollout, self.free, key)
        for value, rows in _by_key(self.train, waiting, key).items():
            candidates = theirs.get(value, [])
            if len(rows) * len(candidates) > _CROWD:
                self._note_ambiguous(method, candidates, rows)
                continue
            for row in rows:
                agreeing = [
                    other
                    for other in candidates
                    if other in self.free and self._agrees(other, row, method)
                ]
                # One candidate per row, and (by index or tokens) one row per candidate: anything
                # else would be a guess.
                rivals = [
                    rival
                    for rival in rows
                    if rival not in self.matched
                    and agreeing
                    and self._agrees(agreeing[0], rival, method)
                ]
                if len(agreeing) == 1 and len(rivals) == 1:
                    self.matched[row] = (agreeing[0], method)
                    self.free.discard(agreeing[0])
                elif agreeing:
                    self._note_ambiguous(method, agreeing, rivals)

    def _note_ambiguous(
        self, method: Method, rollout_rows: list[int], train_rows: list[int]
    ) -> None:
        there, here = len(rollout_rows), len(train_rows)
        what = "the same tokens" if method == "tokens" else f"this {method}"
        for side, rows, counts in (
            ("rollout", rollout_rows, f"{here} there, {there} here"),
            ("train", train_rows, f"{there} there, {here} here"),
        ):
            for row in rows:
                self.ambiguous.setdefault(
                    (side, row),
                    f"ambiguous: {counts} have {what}, and nothing else tells them apart",
                )

    def _agrees(self, rollout_row: int, train_row: int, method: Method) -> bool:
        mine, theirs = self.train, self.rollout
        for name, ours, other in (
            ("sample_index", mine.indices[train_row], theirs.indices[rollout_row]),
            ("rollout_id", mine.rollouts[train_row], theirs.rollouts[rollout_row]),
        ):
            if ours is not None and other is not None and ours != other:
                self._conflict(train_row, method, f"{name} is {other} there and {ours} here")
                return False
        if mine.tokens is None or theirs.tokens is None:
            return method != "tokens"
        ours_tokens, other_tokens = mine.tokens[train_row], theirs.tokens[rollout_row]
        if len(ours_tokens) == len(other_tokens) and np.array_equal(ours_tokens, other_tokens):
            return True
        common = min(len(ours_tokens), len(other_tokens))
        differ = np.flatnonzero(ours_tokens[:common] != other_tokens[:common])
        at = int(differ[0]) if differ.size else common
        self._conflict(train_row, method, f"its tokens differ from token {at} on")
        return False

    def _conflict(self, train_row: int, method: Method, text: str) -> None:
        if method != "tokens":
            self.conflicts.setdefault(
                train_row, f"the sample of the same {method} is another one: {text}"
            )

    def _result(self) -> Join:
        pairs = []
        for row, (other, method) in sorted(self.matched.items()):
            position, index = self.train.positions[row], self.train.indices[row]
            pairs.append(
                Pair(
                    rollout_row=other,
                    train_row=row,
                    rollout_position=(
                        self.rollout.positions[other] if position is None else position
                    ),
                    sample_index=self.rollout.indices[other] if index is None else index,
                    method=method,
                )
            )
        unmatched = [row for row in self.train.rows if row not in self.matched]
        return Join(
            pairs=tuple(pairs),
            missing_in_rollout=tuple(self._missing_in_rollout(row) for row in unmatched),
            missing_in_train=tuple(self._missing_in_train(row) for row in sorted(self.free)),
        )

    def _missing_in_rollout(self, row: int) -> Missing:
        position, index = self.train.positions[row], self.train.indices[row]
        reason = self.conflicts.get(row) or self.ambiguous.get(("train", row))
        if reason is None:
            reason = (
                f"the rollout dump holds no sample {_named(position, index)}; was it removed, or is"
                " the file of another run?"
            )
        return Missing(row=row, rollout_position=position, sample_index=index, reason=reason)

    def _missing_in_train(self, row: int) -> Missing:
        position, index = self.rollout.positions[row], self.rollout.indices[row]
        reason = self.noted.reason(position, index) or (
            "removed by the producer (remove_sample)" if self.rollout.removed[row] else None
        )
        reason = reason or self.ambiguous.get(("rollout", row))
        if reason is None and REPLAY_KEY in self.train.dump.metadata:
            reason = (
                "the train dump is an export of one micro-batch, and this sample is not in that"
            )
        if reason is None:
            reason = (
                f"the train dump holds no sample {_named(position, index)} and does not list it as"
                " dropped"
            )
        return Missing(row=row, rollout_position=position, sample_index=index, reason=reason)


class _Noted:
    """Look up what a train dump says of samples it does not hold."""

    def __init__(self, dump: Dump, held: set[int]) -> None:
        self.by_position: dict[int, str] = {}
        self.by_index: dict[int, str] = {}
        for shard in dump.dp_shards:
            text = (
                f"in the partition of data-parallel rank {shard.get('data_parallel_rank')}, but"
                " that shard's sample is not in the file"
            )
            self.by_position |= dict.fromkeys(set(_numbers(shard.get("partition"))) - held, text)
        if dump.schedule is not None:
            self.by_position |= dict.fromkeys(
                plan_dropped(dump.schedule), "dropped by the schedule"
            )
        for entry in dump.dropped:
            position, index, text = (
                entry.get("rollout_position"),
                entry.get("sample_index"),
                f"dropped: {entry.get('reason')}",
            )
            if position is not None:
                self.by_position[position] = text
            elif index is not None:
                self.by_index[index] = text

    def reason(self, position: int | None, index: int | None) -> str | None:
        found = None if position is None else self.by_position.get(position)
        return found if found is not None or index is None else self.by_index.get(index)


def _by_key(
    side: _Side, rows: Iterable[int], key: Callable[[_Side, int], Hashable]
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for row in rows:
        value = key(side, row)
        if value is not None:
            groups.setdefault(value, []).append(row)
    return groups


def _integers(dump: Dump, name: str) -> list[int | None]:
    if name not in dump.fields:
        return [None] * dump.num_samples
    column = dump.column(name)
    values = column.tolist() if isinstance(column, np.ndarray) else list(column)
    return [
        value if isinstance(value, int) and not isinstance(value, bool) else None
        for value in values
    ]


def _flags(dump: Dump, name: str) -> list[bool]:
    return (
        [bool(value) for value in dump.column(name)]
        if name in dump.fields
        else [False] * dump.num_samples
    )


def _numbers(value: object) -> list[int]:
    array = np.asarray([] if value is None else value)
    return (
        [int(number) for number in array.reshape(-1).tolist()] if array.dtype.kind in "iuf" else []
    )


def _named(position: int | None, index: int | None) -> str:
    parts = [f"at position {position}"] if position is not None else []
    parts += [f"with sample_index {index}"] if index is not None else []
    return " or ".join(parts) or "that could be it (it has neither position nor index)"
