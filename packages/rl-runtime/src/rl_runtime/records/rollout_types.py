"""The records of a rollout: prompt, sample, rollout, prompt group; all frozen.

Everything groups by id: a prompt group holds rollouts (`group_id`), a rollout holds samples
(`rollout_id`).

Invariants, checked on construction: all per-token arrays of a sample have one entry per response
token; samples of a rollout share its id; a sample has at least one prompt token and one response
token.

Axes: P prompt tokens, R response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_runtime.errors import GenerateError
from rl_topp import NucleusSet

__all__ = ["Prompt", "PromptGroup", "Rollout", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """An entry of a data source.

    Example: group_id 7, sample_index 7, text "cat ->", tokens [5, 3, 22, 1, 9], label "tac",
    metadata {"word": "cat"}.
    """

    group_id: int
    """Running number of the prompt: the id of its prompt group."""
    sample_index: int
    """The data source's running number."""
    text: str
    """Prompt text, for people."""
    tokens: npt.NDArray[np.int64]
    """int64 [P], token ids; tokenised once, never again."""
    label: str
    """The right answer, or an empty string."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the verifier needs; JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable token sequence: a prompt, a response, and the engine's words on each token.

    Example: prompt_tokens [11, 12], response_tokens [21, 22, 23], of which a tool gave the second:
    loss_mask [1, 0, 1], rollout_log_probs [-0.5, 0, -1.25], weight_versions [3, -1, 4], nucleus
    {21, 9}, {}, {23, 5, 6}, and after scoring reward 1.0.
    """

    rollout_id: int
    """Execution that the sample came from; siblings of a fan-out share it."""
    group_id: int
    """Prompt group."""
    sample_index: int | None
    """The data source's number, or None."""
    prompt_tokens: npt.NDArray[np.int64]
    """int64 [P], P >= 1."""
    response_tokens: npt.NDArray[np.int64]
    """int64 [R], R >= 1: the ids that the engine sampled, and tool tokens."""
    loss_mask: npt.NDArray[np.int32]
    """int32 [R]: 1 = trained, 0 = not (tool and environment tokens)."""
    rollout_log_probs: npt.NDArray[np.float32]
    """float32 [R], nats; 0 where not sampled.

    Over the nucleus where one was recorded, else over the vocabulary.
    """
    weight_versions: npt.NDArray[np.int64]
    """int64 [R]: policy version that sampled each token; -1 where not sampled."""
    nucleus: NucleusSet | None = None
    """Nuclei of the R response tokens, or None when none were asked for."""
    rollout_full_log_probs: npt.NDArray[np.float32] | None = None
    """float32 [R], nats, over the vocabulary; or None."""
    finish_reason: str = "stop"
    """"stop", "length" or "abort"."""
    reward: float | None = None
    """Score of the response; None until it is scored."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Further scores for people, such as {"exact_match": 1.0}."""
    prompt: str = ""
    """Prompt text, for people."""
    response: str = ""
    """Response text, for people and verifiers."""
    label: str = ""
    """The right answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the verifier needs; JSON values."""

    def __post_init__(self) -> None:
        """Check lengths.

        Raises:
            GenerateError: an array does not have one entry per response token, or prompt or
                response is empty.
        """
        where = f"sample of rollout {self.rollout_id} (group {self.group_id})"
        if self.prompt_tokens.size == 0 or self.response_tokens.size == 0:
            raise GenerateError(
                f"{where}: has {self.prompt_tokens.size} prompt and {self.response_tokens.size}"
                " response tokens; each needs at least one"
            )
        arrays: dict[
            str, npt.NDArray[np.int32] | npt.NDArray[np.int64] | npt.NDArray[np.float32] | None
        ] = {
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.rollout_log_probs,
            "weight_versions": self.weight_versions,
            "rollout_full_log_probs": self.rollout_full_log_probs,
        }
        counts = {name: len(array) for name, array in arrays.items() if array is not None}
        if self.nucleus is not None:
            counts["nucleus"] = len(self.nucleus.offsets) - 1
        wrong = {
            name: count for name, count in counts.items() if count != self.response_tokens.size
        }
        if wrong:
            raise GenerateError(
                f"{where}: {self.response_tokens.size} response tokens, but {wrong}: every"
                " per-token array needs one entry per response token"
            )

    @property
    def truncated(self) -> bool:
        """Whether the response was cut by the length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of a prompt: one or more samples that share `rollout_id`.

    Example: rollout 4 of group 7, compacted twice: three samples of 12, 20 and 9 tokens, each with
    rollout_id 4 and group_id 7. It counts once in a step, however many samples it has.
    """

    rollout_id: int
    """Unit of batch size and of loss weight."""
    group_id: int
    """Prompt group."""
    samples: tuple[Sample, ...]
    """At least one."""

    def __post_init__(self) -> None:
        """Check ids.

        Raises:
            GenerateError: no samples, or a sample that carries another rollout or group id.
        """
        if not self.samples:
            raise GenerateError(
                f"rollout {self.rollout_id} (group {self.group_id}): no samples; a generate"
                " function returns at least one"
            )
        ids = {(sample.rollout_id, sample.group_id) for sample in self.samples}
        if ids != {(self.rollout_id, self.group_id)}:
            raise GenerateError(
                f"rollout {self.rollout_id} (group {self.group_id}): its samples carry (rollout_id,"
                f" group_id) = {sorted(ids)}; all must be equal"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """All rollouts of one prompt.

    Example: group 7 with rollouts 28 to 31; rewards 1.0, 0.0, 0.0, 1.0 are normalised among them.
    """

    group_id: int
    """Id of the prompt."""
    rollouts: tuple[Rollout, ...]
    """In the order they were asked for."""
