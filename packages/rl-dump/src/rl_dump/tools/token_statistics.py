"""What a dump implies per token: the log-prob gap, the size of its nucleus, whether it was trained.

Summary, doctor and page all take these from here, so that they agree.

Axes: N samples, R response tokens of a sample, T response tokens of all samples end to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.columns.ragged import RaggedArray
from rl_dump.reader import Dump

__all__ = [
    "log_prob_gap",
    "mean_of",
    "nucleus_sizes",
    "ragged_field",
    "sample_values",
    "scalar_field",
    "trained_tokens",
]


def mean_of(values: NDArray[Any]) -> float:
    """Return the mean of one or more numbers, summed in float64.

    Finite where all of them are, though their sum may not be: [1e308] * 4.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean(dtype=np.float64))
        if np.isinf(mean) and bool(np.isfinite(values).all()):
            mean = float((values.astype(np.float64) / values.size).sum())
    return mean


def ragged_field(dump: Dump, name: str) -> RaggedArray | None:
    """Return a field with an array for every sample, None if the dump has no such field."""
    column = dump.column(name) if name in dump.fields else None
    return column if isinstance(column, RaggedArray) else None


def scalar_field(dump: Dump, name: str) -> NDArray[Any] | None:
    """Return a field with a number for every sample: array [N].

    None if the dump has no such field or not for every sample.
    """
    column = dump.column(name) if name in dump.fields else None
    return column if isinstance(column, np.ndarray) else None


def sample_values(dump: Dump, name: str) -> list[Any]:
    """Return a field's value of every sample as a list, all None if the dump has no such field."""
    column = dump.column(name) if name in dump.fields else [None] * dump.num_samples
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def trained_tokens(dump: Dump) -> NDArray[np.bool_] | None:
    """Return which response tokens were trained on: bool [T], all samples end to end.

    None without a loss mask.
    """
    masks = ragged_field(dump, "loss_masks")
    return None if masks is None else masks.values != 0


def log_prob_gap(dump: Dump) -> RaggedArray | None:
    """Return |trainer's log-prob - engine's log-prob| of every response token: [R] per sample.

    float32, or float64 if one of them is; zero where a token was not trained on, since the engine
    gave it no log-prob. None without a number per token of both.
    """
    ours, theirs = ragged_field(dump, "log_probs"), ragged_field(dump, "rollout_log_probs")
    if (
        ours is None
        or theirs is None
        or ours.values.ndim + theirs.values.ndim > 2
        or not np.array_equal(ours.offsets, theirs.offsets)
    ):
        return None
    dtype = np.result_type(ours.dtype, theirs.dtype, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(ours.values.astype(dtype) - theirs.values.astype(dtype))
    trained = trained_tokens(dump)
    if trained is not None and len(trained) == len(gap):
        gap = np.where(trained, gap, dtype.type(0))
    return RaggedArray(gap, ours.offsets)


def nucleus_sizes(dump: Dump) -> RaggedArray | None:
    """Return how many ids each token's nucleus holds: int64 [R] per sample, None without nuclei.

    Offsets [0, 3, 4] of one sample mean sizes [3, 1].
    """
    offsets = ragged_field(dump, "nucleus_offsets")
    if offsets is None or bool((offsets.lengths < 1).any()):
        return None
    steps = np.diff(offsets.values.astype(np.int64))
    # The step from one sample's last offset to the next one's first is not a nucleus.
    inner = np.ones(len(steps), np.bool_)
    inner[offsets.offsets[1:-1] - 1] = False
    return RaggedArray(steps[inner], np.concatenate([[0], np.cumsum(offsets.lengths - 1)]))
