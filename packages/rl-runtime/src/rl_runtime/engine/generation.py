"""What is asked of an engine and what it answers: our records, and SGLang's JSON of both.

Invariants: an answer to a request with a filter carries its nuclei, or reading it fails; all arrays
of an answer have one entry per token.

Axes: R tokens of one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_runtime.errors import EngineError
from rl_topp import NucleusError, NucleusSet, from_sglang_meta, kept_log_probs_from_sglang_meta
from rl_topp.sglang.keys import OPT_IN_KEY

__all__ = ["Generation", "Sampling", "read_generation"]

_ONLY_AT_THE_END = 1 << 30
"""Stream interval, in tokens: one chunk when the first token is there, one at the end.

Anything shorter makes the server serialise every answer again and again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn.

    Example: `Sampling(temperature=1.0, top_p=0.9, max_new_tokens=8)`.
    """

    temperature: float = 1.0
    """Divides the logits. 0: greedy, log-probs then at temperature 1."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps all."""
    top_k: int = -1
    """Most likely ids kept; -1 keeps all."""
    min_p: float = 0.0
    """Ids below this fraction of the largest probability are cut."""
    max_new_tokens: int = 8
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, beside the model's end-of-sequence ids."""

    @property
    def has_filter(self) -> bool:
        """Whether ids can be cut, so that answers carry nuclei."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.temperature == 0.0

    def to_request(self) -> dict[str, Any]:
        """Return SGLang's `sampling_params`."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "stream_interval": _ONLY_AT_THE_END,
        }
        return {**params, "custom_params": {OPT_IN_KEY: True}} if self.has_filter else params


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer of R tokens, the end-of-sequence id included.

    R is 0 when it was aborted before its first token.

    Example: tokens [17, 1], full_log_probs [-0.9, -0.1], nucleus_log_probs [-0.5, 0.0], nuclei
    {17, 40} and {1}, "stop", version 3.
    """

    tokens: npt.NDArray[np.int64]
    """int64 [R], the sampled ids."""
    full_log_probs: npt.NDArray[np.float32]
    """float32 [R], nats: log-probs of the ids over the vocabulary, at the sampling temperature."""
    nucleus_log_probs: npt.NDArray[np.float32]
    """float32 [R], nats: over the nucleus; equal to `full_log_probs` without a filter."""
    nucleus: NucleusSet | None
    """Nuclei of the R tokens; None without a filter."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    weight_version: int
    """Version of the weights that drew the last token."""


def read_generation(
    chunk: Mapping[str, Any], sampling: Sampling, *, vocab_size: int, where: str
) -> Generation:
    """Read the last chunk of an answer.

    Args:
        chunk: `output_ids` and `meta_info`, as SGLang streams them.
        sampling: how the answer was drawn.
        vocab_size: ids at or above it are refused.
        where: begins the message of an error, such as "engine http://127.0.0.1:21370".

    Raises:
        EngineError: nuclei that were asked for are missing, an array has another length than the
            tokens, or the weight version is not a number.
    """
    meta = chunk["meta_info"]
    tokens_R = np.asarray(chunk["output_ids"], dtype=np.int64)
    full_R = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)
    nucleus: NucleusSet | None = None
    nucleus_R: npt.NDArray[np.float32] | None = full_R
    try:
        if sampling.has_filter:
            nucleus = from_sglang_meta(
                meta, expected_num_tokens=tokens_R.size, vocab_size=vocab_size
            )
            # An answer that was aborted before its first token carries no list of log-probs.
            if tokens_R.size:
                nucleus_R = kept_log_probs_from_sglang_meta(meta, expected_num_tokens=tokens_R.size)
    except NucleusError as error:
        raise EngineError(f"{where}: the kept sets of an answer cannot be read: {error}") from error
    if full_R.size != tokens_R.size or nucleus_R is None:
        raise EngineError(
            f"{where}: {tokens_R.size} tokens came with {full_R.size} log-probs and"
            f" {0 if nucleus_R is None else nucleus_R.size} kept-set log-probs"
        )
    return Generation(
        tokens=tokens_R,
        full_log_probs=full_R,
        nucleus_log_probs=nucleus_R,
        nucleus=nucleus,
        finish_reason=meta["finish_reason"]["type"],
        weight_version=_read_version(meta["weight_version"], where),
    )


def _read_version(version: str, where: str) -> int:
    # SGLang calls the weights that it was started with "default" unless it is told otherwise.
    if version != "default" and not version.isdecimal():
        raise EngineError(
            f"{where}: has weight version {version!r}, expected a number: another program updates"
            " it"
        )
    return 0 if version == "default" else int(version)
