"""The entries that prompts are made of: reasoning-gym generators and JSON-lines files.

Entries are split into train, check (early stopping of the warm start) and eval by a hash of one
metadata field, so that no word of an evaluation was trained on.

Invariants: the same section and random start give the same entries in the same order; the three
splits share no `split_key` value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_runtime.config.rollout import DataSection
from rl_runtime.errors import ConfigError

__all__ = ["Entries", "Entry", "Split", "make_entries", "split_of"]

Split = Literal["train", "check", "eval"]
Entry = Mapping[str, Any]
"""Keys `question`, `answer` and `metadata`, as in reasoning-gym."""

_STREAM_LENGTH = 10**7
"""Entries set aside for one stream.

reasoning-gym draws entry i from Random(seed + i): streams that start closer would repeat each
other.
"""
_STREAMS = {"train": 0, "check": 1, "eval": 2, "sft": 3}
"""Stream by name: the splits, and training entries for the warm start."""


class Entries(Protocol):
    """Entries of each split, in a fixed order."""

    def stream(self, split: Split, *, sft: bool = False) -> Iterator[Entry]:
        """Begin a split anew; with `sft`, generators draw others than without."""


def make_entries(section: DataSection, *, rng: int) -> Entries:
    """Open what `[data]` names.

    Raises:
        ConfigError: no such task or file, a line without a prompt, or a file without entries for
            some split.
    """
    return _FileEntries(section) if section.kind == "jsonl" else _GeneratedEntries(section, rng=rng)


def split_of(value: str, held_out_fraction: float) -> Split:
    """Decide the split of one `split_key` value, by its SHA-256.

    Args:
        value: the value, such as a word.
        held_out_fraction: share of check and eval together; each gets half.
    """
    share = int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "big") / 2**64
    if share >= held_out_fraction:
        return "train"
    return "check" if share < held_out_fraction / 2 else "eval"


class _GeneratedEntries:
    def __init__(self, section: DataSection, *, rng: int) -> None:
        import reasoning_gym

        self._section = section
        size = len(_STREAMS) * _STREAM_LENGTH
        try:
            self._dataset = reasoning_gym.create_dataset(
                section.task, size=size, seed=rng * size, **section.options
            )
        except Exception as error:
            # A task checks its options in its own way: by assertions, by arithmetic, or not at all
            # before its first entry.
            raise ConfigError(
                f"data.task = {section.task!r} with data.options = {section.options}: {error}"
            ) from error

    def stream(self, split: Split, *, sft: bool = False) -> Iterator[Entry]:
        start = _STREAMS["sft" if sft else split] * _STREAM_LENGTH
        for index in range(start, start + _STREAM_LENGTH):
            entry = self._dataset[index]
            if _split_of_entry(entry, self._section) == split:
                yield entry


class _FileEntries:
    def __init__(self, section: DataSection) -> None:
        self._by_split: dict[Split, list[Entry]] = {"train": [], "check": [], "eval": []}
        try:
            lines = Path(section.path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.path = {section.path!r}: {getattr(error, 'strerror', None) or error}: give a"
                " file with one JSON object a line"
            ) from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                entry = _parse_line(line, f"data.path = {section.path!r}, line {number}")
                self._by_split[_split_of_entry(entry, section)].append(entry)
        empty = [split for split, entries in self._by_split.items() if not entries]
        if empty:
            raise ConfigError(
                f"data.path = {section.path!r}: no entry fell into {empty}; give more lines or"
                " another data.held_out_fraction"
            )

    def stream(self, split: Split, *, sft: bool = False) -> Iterator[Entry]:
        del sft
        while True:
            yield from self._by_split[split]


def _parse_line(line: str, where: str) -> Entry:
    try:
        record = json.loads(line)
        prompt, label = str(record["prompt"]), str(record.get("label", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{where}: expected an object with "prompt" (and "label"): {error!r}'
        ) from error
    return {"question": prompt, "answer": label, "metadata": {**record, "prompt": prompt}}


def _split_of_entry(entry: Entry, section: DataSection) -> Split:
    key = section.split_key
    if not key and section.kind == "jsonl":
        return split_of(str(entry["question"]), section.held_out_fraction)
    try:
        value = str(entry["metadata"][key]).casefold()
    except KeyError as error:
        raise ConfigError(
            f"data.split_key = {key!r}: the entry's metadata has {sorted(entry['metadata'])}"
        ) from error
    return split_of(value, section.held_out_fraction)
