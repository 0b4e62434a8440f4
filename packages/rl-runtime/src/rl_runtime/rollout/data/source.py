"""Where prompts come from: reasoning-gym generators and JSON-lines files.

Prompts are tokenised here, once. Entries are split into train, check (early stopping of the warm
start) and eval by a hash of one metadata field, so that no word of an evaluation was trained on.

Invariants: the same recipe gives the same prompts in the same order; the three splits share no
`split_key` value; group ids never repeat.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rl_runtime.config.rollout import DataSection
from rl_runtime.errors import ConfigError
from rl_runtime.records.rollout_types import Prompt

__all__ = [
    "DataSource",
    "Entry",
    "Split",
    "Tokenizer",
    "check_data",
    "make_data_source",
    "split_of",
]

Split = Literal["train", "check", "eval"]
Entry = Mapping[str, Any]
"""Keys `question`, `answer` and `metadata`, as in reasoning-gym."""

_STREAM_LENGTH = 10**7
"""Entries set aside for one stream.

reasoning-gym draws entry i from Random(seed + i): streams that start closer would repeat each
other.
"""
_SPLIT_STREAMS: Mapping[Split, int] = {"train": 0, "check": 1, "eval": 2}
_NUM_STREAMS = 4
_WARM_START_STREAM = 3


class Tokenizer(Protocol):
    """The calls that we make of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Render messages as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Ids to text."""


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


class DataSource:
    """Tokenised prompts of each split, without end for generators, repeated in order for files."""

    def __init__(self, section: DataSection, entries: _Entries, tokenizer: Tokenizer) -> None:
        """Take entries from `entries` and tokenise them by the section's template."""
        self._section = section
        self._entries = entries
        self._tokenizer = tokenizer
        self._train = entries.stream("train")
        self._warm_start = entries.stream("train", warm_start=True)
        self._next_group = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        """Take the next `count` training prompts."""
        return [self._prompt(next(self._train)) for _ in range(count)]

    def next_warm_start_prompts(self, count: int) -> list[Prompt]:
        """Take the next `count` prompts for supervised fine-tuning; their draws are others than those of `next_prompts`."""
        return [self._prompt(next(self._warm_start)) for _ in range(count)]

    def held_out(self, split: Literal["check", "eval"], count: int) -> list[Prompt]:
        """Give the first `count` prompts of a held-out split; the same ones at each call."""
        stream = self._entries.stream(split)
        return [self._prompt(next(stream)) for _ in range(count)]

    def _prompt(self, entry: Entry) -> Prompt:
        text = self._render(entry)
        group_id = self._next_group
        self._next_group += 1
        tokens = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int64)
        return Prompt(
            group_id=group_id,
            sample_index=group_id,
            text=text,
            tokens=tokens,
            label=str(entry["answer"]),
            metadata=dict(entry),
        )

    def _render(self, entry: Entry) -> str:
        content = _message(self._section, entry)
        if not self._section.chat_template:
            return content
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )


def _message(section: DataSection, entry: Entry) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        return section.prompt_template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"data.prompt_template = {section.prompt_template!r}: {error!r}; the entry has the"
            f" fields {sorted(fields)}"
        ) from error


class _Entries(Protocol):
    def stream(self, split: Split, *, warm_start: bool = False) -> Iterator[Entry]: ...


class _ReasoningGymEntries:
    def __init__(self, section: DataSection, *, rng: int) -> None:
        import reasoning_gym

        self._section = section
        seed = rng * _NUM_STREAMS * _STREAM_LENGTH
        try:
            self._dataset = reasoning_gym.create_dataset(
                section.task, size=_NUM_STREAMS * _STREAM_LENGTH, seed=seed, **section.options
            )
        except Exception as error:
            # A task checks its options in its own way: by assertions, by arithmetic, or not at all
            # before its first entry.
            raise ConfigError(
                f"data.task = {section.task!r} with data.options = {section.options}: {error}"
            ) from error

    def stream(self, split: Split, *, warm_start: bool = False) -> Iterator[Entry]:
        start = (_WARM_START_STREAM if warm_start else _SPLIT_STREAMS[split]) * _STREAM_LENGTH
        for index in range(start, start + _STREAM_LENGTH):
            entry = self._dataset[index]
            if (
                split_of(
                    _split_value(entry, self._section.split_key), self._section.held_out_fraction
                )
                == split
            ):
                yield entry


class _FileEntries:
    def __init__(self, section: DataSection) -> None:
        self._section = section
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
                entry = self._parse(line, number)
                value = (
                    _split_value(entry, section.split_key)
                    if section.split_key
                    else str(entry["question"])
                )
                self._by_split[split_of(value, section.held_out_fraction)].append(entry)
        empty = [split for split, entries in self._by_split.items() if not entries]
        if empty:
            raise ConfigError(
                f"data.path = {section.path!r}: no entry fell into {empty}; give more lines or"
                " another data.held_out_fraction"
            )

    def _parse(self, line: str, number: int) -> Entry:
        try:
            record = json.loads(line)
            prompt, label = str(record["prompt"]), str(record.get("label", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"data.path = {self._section.path!r}, line {number}: expected an object with"
                f' "prompt" (and "label"): {error!r}'
            ) from error
        return {"question": prompt, "answer": label, "metadata": {**record, "prompt": prompt}}

    def stream(self, split: Split, *, warm_start: bool = False) -> Iterator[Entry]:
        del warm_start
        while True:
            yield from self._by_split[split]


def _split_value(entry: Entry, key: str) -> str:
    try:
        return str(entry["metadata"][key]).casefold()
    except KeyError as error:
        raise ConfigError(
            f"data.split_key = {key!r}: the entry's metadata has {sorted(entry['metadata'])}"
        ) from error


def check_data(section: DataSection, *, rng: int) -> None:
    """Read the first training entry and render its message, without a tokenizer.

    Raises:
        ConfigError: no such task, file or field, or a file without entries for some split.
    """
    try:
        _message(section, next(_make_entries(section, rng=rng).stream("train")))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"data.task = {section.task!r} with data.options = {section.options}:"
            f" {type(error).__name__}: {error}"
        ) from error


def make_data_source(section: DataSection, tokenizer: Tokenizer, *, rng: int) -> DataSource:
    """Make the source that a recipe asks for.

    Args:
        section: `[data]`.
        tokenizer: the policy's tokenizer.
        rng: random start; sources of different starts share no entry draws.

    Raises:
        ConfigError: no such task, file or field.
    """
    return DataSource(section, _make_entries(section, rng=rng), tokenizer)


def _make_entries(section: DataSection, *, rng: int) -> _Entries:
    return (
        _FileEntries(section) if section.kind == "jsonl" else _ReasoningGymEntries(section, rng=rng)
    )
