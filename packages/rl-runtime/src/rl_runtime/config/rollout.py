"""What is sampled, by whom, from which prompts: `rollout`, `engine`, `data`, `reward`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["DataSection", "EngineSection", "RewardSection", "RolloutSection"]


class RolloutSection(Section):
    """What is sampled for one batch, and how."""

    prompts_per_batch: int = Field(default=64, ge=1)
    """Prompts of one rollout batch."""

    rollouts_per_prompt: int = Field(default=8, ge=1)
    """Rollouts of one prompt: the size of its group."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. Log-probs are taken at this temperature on both sides."""

    top_p: float = Field(default=0.9, gt=0, le=1)
    """Nucleus mass. 1: no nucleus filter."""

    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely ids kept. -1: all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Ids below this fraction of the largest probability are cut. 0: none."""

    max_response_tokens: int = Field(default=8, ge=1)
    """Longest response, in tokens."""

    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the tokenizer's end-of-sequence id."""

    replay: bool = True
    """Train on the recorded kept sets.

    Off: log-probs are normalised over the whole vocabulary in training.
    """

    generate: str = ""
    """Import path `module:function` of a custom generate hook. Empty: one sample per rollout."""

    rollout_deadline_seconds: float = Field(default=300.0, gt=0)
    """How long the generation of one batch may take, in seconds."""


class EngineSection(Section):
    """The SGLang servers that sample rollouts."""

    count: int = Field(default=1, ge=1)
    """Number of engines. Prompts are spread over them in turn."""

    gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs, and tensor-parallel ranks, of one engine. 0: the engine runs on the CPU."""

    host: str = "127.0.0.1"
    """Address that the servers listen on."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server; the next ones follow it.

    0: free ports are chosen. A taken port is an error.
    """

    url: str = ""
    """URL of a server that is already running. Empty: the run starts its own."""

    on_failure: Literal["end"] = "end"
    """What a dead engine does to the run. "end": the run ends with an error."""

    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a server may take until it answers, in seconds."""

    request_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long one request may take, in seconds."""

    health_interval_seconds: float = Field(default=2.0, gt=0)
    """Seconds between two checks that the server process lives."""

    max_concurrent_requests: int = Field(default=512, ge=1)
    """Requests in flight to one engine at a time."""

    max_total_tokens: int = Field(default=65536, ge=1024)
    """Tokens that the engine's KV cache holds."""


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
    """User message, a format string over the entry's metadata and `question`.

    For files: over the line's fields, and `question` is its prompt.
    """

    chat_template: bool = True
    """Render the message with the tokenizer's chat template.

    Off: the message is the prompt as it is.
    """

    held_out_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of entries, chosen by a hash of `split_key`, that only evaluation sees."""

    split_key: str = "word"
    """Metadata field whose hash decides between training and evaluation.

    No word is in both.
    """


class RewardSection(Section):
    """How responses are scored."""

    function: str = "rl_runtime.rollout.reward:verifier_reward"
    """Import path `module:function` of the reward.

    It is called once per rollout, with its last sample.
    """

    timeout_seconds: float = Field(default=30.0, gt=0)
    """How long one call may take, in seconds.

    A reward that is late or fails drops its rollout, with a warning.
    """
