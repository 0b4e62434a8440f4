"""`[data]`: where prompts come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["DataSection"]


class DataSection(Section):
    """Where prompts come from."""

    kind: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    """reasoning_gym: a task generator with its own verifier.

    jsonl: a file with one {"prompt", "label"} object a line.
    """

    task: str = "spell_backward"
    """Name of the reasoning-gym task."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reasoning-gym task."""

    path: str = ""
    """File of prompts for kind "jsonl"."""

    prompt_template: str = "{question}"
    """User message, a format string over the entry's metadata and `question` (for files: the line's fields, and `question` = its prompt)."""

    chat_template: bool = True
    """Render the message with the tokenizer's chat template.

    Off: the message is the prompt as it is.
    """

    held_out_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of entries, chosen by a hash of `split_key`, that only evaluation sees."""

    split_key: str = "word"
    """Metadata field whose hash decides between training and evaluation, so that no word is in both."""
