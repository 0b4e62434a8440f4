"""Which sample of a train dump is which sample of the rollout dump of the same batch.

A pair is never a guess: position, index and tokens must not contradict each other.

Invariants, each matched by a test in `tests/property/test_join_laws.py`:

- every row of either dump is in exactly one pair or in exactly one missing entry;
- the pairs do not depend on the order of rows in either file;
- paired samples have equal tokens where both dumps hold tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rl_dump.checks import placed_positions
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import ROLLOUT_DUMP, TRAIN_DUMP
from rl_dump.errors import DumpError
from rl_dump.reader import Dump
from rl_dump.tools.plan_drops import plan_drops
from rl_dump.tools.replay import REPLAY_KEY
from rl_dump.tools.token_statistics import sample_values

__all__ = ["Join", "Method", "Missing", "Pair", "join"]

Method: TypeAlias = Literal["position", "index", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One sample in both dumps."""

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
    """A sample that only one of the dumps holds."""

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
    """The result of `join`; its three parts together name every row of both dumps once."""

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
    return _Matcher(_Side(rollout_dump), _Side(train_dump)).run()


_CROWD = 10_000
"""Most comparisons among samples of one key.

A larger crowd cannot be told apart, and comparing it takes minutes.
"""


class _Side:
    """One dump's keys: position, index, rollout and tokens of every row."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.rows = range(dump.num_samples)
        self.positions = _integers(dump, "rollout_position")
        self.indices = _integers(dump, "sample_index")
        self.rollouts = _integers(dump, "rollout_ids")
        tokens = dump.column("tokens", stored=True) if "tokens" in dump.fields else None
        self.tokens = tokens if isinstance(tokens, RaggedArray) else None
        self.removed = list(map(bool, sample_values(dump, "remove_sample")))
        if dump.contract == ROLLOUT_DUMP and all(position is None for position in self.positions):
            # A rollout dump is written in rollout order: its row is the position.
            self.positions = list(self.rows)

    def token_key(self, row: int) -> Hashable:
        return None if self.tokens is None else self.tokens[row].astype(np.int64).tobytes()

    def missing(self, row: int, reason: str) -> Missing:
        return Missing(
            row=row,
            rollout_position=self.positions[row],
            sample_index=self.indices[row],
            reason=reason,
        )

    def named(self, row: int) -> str:
        position, index = self.positions[row], self.indices[row]
        parts = [f"at position {position}"] if position is not None else []
        parts += [f"with sample_index {index}"] if index is not None else []
        return " or ".join(parts) or "that could be it (it has neither position nor index)"


class _Matcher:
    """The matching of two sides, best evidence first."""

    def __init__(self, rollout: _Side, train: _Side) -> None:
        self.rollout, self.train = rollout, train
        self.matched: dict[int, tuple[int, Method]] = {}
        self.free = set(rollout.rows)
        self.noted = _noted_reasons(rollout, train)
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
        return Join(
            pairs=tuple(pairs),
            missing_in_rollout=tuple(
                self.train.missing(row, self._why_not_in_rollout(row))
                for row in self.train.rows
                if row not in self.matched
            ),
            missing_in_train=tuple(
                self.rollout.missing(row, self._why_not_in_train(row)) for row in sorted(self.free)
            ),
        )

    def _why_not_in_rollout(self, row: int) -> str:
        return (
            self.conflicts.get(row)
            or self.ambiguous.get(("train", row))
            or f"the rollout dump holds no sample {self.train.named(row)}; was it removed, or is"
            " the file of another run?"
        )

    def _why_not_in_train(self, row: int) -> str:
        reasons = (
            self.noted.get(("position", self.rollout.positions[row])),
            self.noted.get(("index", self.rollout.indices[row])),
            "removed by the producer (remove_sample)" if self.rollout.removed[row] else None,
            self.ambiguous.get(("rollout", row)),
            "the train dump is an export of one micro-batch, and this sample is not in that"
            if REPLAY_KEY in self.train.dump.metadata
            else None,
        )
        return next(
            filter(None, reasons),
            f"the train dump holds no sample {self.rollout.named(row)} and does not list it as"
            " dropped",
        )


def _noted_reasons(rollout: _Side, train: _Side) -> dict[tuple[str, int | None], str]:
    """Return what a train dump says of samples it does not hold, by position or index.

    Last word wins: the producer's list of dropped samples knows more than the plan, the plan more
    than the shards.
    """
    dump = train.dump
    noted: dict[tuple[str, int | None], str] = {}
    for shard in dump.dp_shards:
        text = (
            f"in the partition of data-parallel rank {shard.get('data_parallel_rank')}, but"
            " that shard's sample is not in the file"
        )
        lost = placed_positions([shard]) - set(train.positions)
        noted |= {("position", position): text for position in lost}
    if dump.schedule is not None:
        ids = {
            position: rollout_id
            for position, rollout_id in zip(rollout.positions, rollout.rollouts, strict=True)
            if position is not None and rollout_id is not None
        }
        drops = plan_drops(dump.schedule, ids, where=f"{dump.path}: schedule")
        noted |= {("position", position): text for position, text in drops.items()}
    for entry in dump.dropped:
        position, text = entry.get("rollout_position"), f"dropped: {entry.get('reason')}"
        key = ("index", entry.get("sample_index")) if position is None else ("position", position)
        noted[key] = text
    # An entry without position and index is of no sample.
    noted.pop(("index", None), None)
    return noted


def _by_key(
    side: _Side, rows: Iterable[int], key: Callable[[_Side, int], Hashable]
) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row in rows:
        groups[key(side, row)].append(row)
    groups.pop(None, None)
    return groups


def _integers(dump: Dump, name: str) -> list[int | None]:
    return [value if type(value) is int else None for value in sample_values(dump, name)]
