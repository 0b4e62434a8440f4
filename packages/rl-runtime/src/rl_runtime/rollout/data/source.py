"""Where prompts come from: entries, rendered and tokenised here, once.

Invariants: the same recipe gives the same prompts in the same order; group ids never repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from rl_runtime.config.rollout import DataSection
from rl_runtime.errors import ConfigError
from rl_runtime.records import Prompt
from rl_runtime.rollout.data.entries import Entries, Entry, make_entries

__all__ = ["DataSource", "Tokenizer", "check_data", "make_data_source"]


class Tokenizer(Protocol):
    """The calls that we make of a Hugging Face tokenizer."""

    eos_token_id: int | None
    """Id that ends a sequence; None: it has none."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """Render messages as text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn ids into text."""


class DataSource:
    """Tokenised prompts of each split, without end for generators, repeated in order for files."""

    def __init__(self, section: DataSection, entries: Entries, tokenizer: Tokenizer) -> None:
        """Take entries from `entries` and tokenise them by the section's template."""
        self._section = section
        self._entries = entries
        self._tokenizer = tokenizer
        self._train = entries.stream("train")
        self._sft = entries.stream("train", sft=True)
        self._next_group = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        """Take the next `count` training prompts."""
        return self._take(self._train, count)

    def next_sft_prompts(self, count: int) -> list[Prompt]:
        """Take the next `count` prompts for the warm start.

        Generators draw others for it than for `next_prompts`.
        """
        return self._take(self._sft, count)

    def held_out(self, split: Literal["check", "eval"], count: int) -> list[Prompt]:
        """Give the first `count` prompts of a held-out split; the same ones at each call."""
        return self._take(self._entries.stream(split), count)

    def _take(self, stream: Iterator[Entry], count: int) -> list[Prompt]:
        return [self._prompt(next(stream)) for _ in range(count)]

    def _prompt(self, entry: Entry) -> Prompt:
        text = _message(self._section, entry)
        if self._section.chat_template:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        group_id = self._next_group
        self._next_group += 1
        # The template wrote the special tokens; `encode` must not add them a second time.
        tokens = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int64)
        return Prompt(
            group_id=group_id,
            sample_index=group_id,
            text=text,
            tokens=tokens,
            label=str(entry["answer"]),
            metadata=dict(entry),
        )


def make_data_source(section: DataSection, tokenizer: Tokenizer, *, rng: int) -> DataSource:
    """Make the source that a recipe asks for.

    Args:
        section: `[data]`.
        tokenizer: the policy's tokenizer.
        rng: random start; generators of different starts draw different entries.

    Raises:
        ConfigError: no such task, file or field.
    """
    return DataSource(section, make_entries(section, rng=rng), tokenizer)


def check_data(section: DataSection, *, rng: int) -> None:
    """Read the first training entry and render its message, without a tokenizer.

    Raises:
        ConfigError: no such task, file or field, or a file without entries for some split.
    """
    try:
        _message(section, next(make_entries(section, rng=rng).stream("train")))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"data.task = {section.task!r} with data.options = {section.options}:"
            f" {type(error).__name__}: {error}"
        ) from error


def _message(section: DataSection, entry: Entry) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        return section.prompt_template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"data.prompt_template = {section.prompt_template!r}: {error!r}; the entry has the"
            f" fields {sorted(fields)}"
        ) from error
