"""What kept sets looked like in a batch: sizes, bytes, kept mass, and what replay changes.

Axes: N response tokens of all samples, flattened.

Invariant: only trained tokens count (loss mask 1), so tool tokens and padding move no figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_topp.nucleus import NucleusStatus

__all__ = ["NucleusStats", "nucleus_stats"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class NucleusStats:
    """Figures over the trained tokens of a dump.

    A figure without data, or one that is not finite, is None, which differs from 0.
    """

    num_tokens: int
    """Trained tokens."""
    num_kept: int
    """Of these: with a recorded set (status 0). Sizes below are over them."""
    num_no_filter: int
    """Of these: sampled from the whole vocabulary (status 1)."""
    num_truncated: int
    """Of these: set lost in transport (status 3)."""
    mean_size: float | None
    """Mean number of kept ids."""
    median_size: float | None
    """Median number of kept ids."""
    p99_size: float | None
    """99th percentile of the number of kept ids."""
    singleton_fraction: float | None
    """Fraction of sets with one id."""
    wire_bytes_per_token: float | None
    """Bytes of `to_wire`'s text per trained token: 4/3 of 4 per id, 4 per offset, 1 per status."""
    mean_kept_mass: float | None
    """Mean probability of the kept set, exp(full log-prob - kept-set log-prob).

    Needs `rollout_full_log_probs`.
    """
    mean_log_ratio_without_replay: float | None
    """Mean of full - kept-set log-prob, nats; needs `rollout_full_log_probs`.

    It is the bias of a trainer that normalises over the vocabulary.
    """
    max_log_ratio_without_replay: float | None
    """Largest absolute value of the same."""
    mean_log_ratio_with_replay: float | None
    """Mean of trainer - rollout log-prob, nats; needs `log_probs`."""
    max_log_ratio_with_replay: float | None
    """Largest absolute value of the same."""


def nucleus_stats(
    *,
    set_sizes: npt.NDArray[np.int64],
    status: npt.NDArray[np.uint8],
    loss_masks: npt.NDArray[np.int32],
    rollout_log_probs: Floats | None = None,
    rollout_full_log_probs: Floats | None = None,
    log_probs: Floats | None = None,
) -> NucleusStats:
    """Summarise the kept sets of N response tokens of any number of samples, flattened.

    Args:
        set_sizes: int64 [N]: stored ids per token.
        status: uint8 [N].
        loss_masks: int32 [N], 1 = trained.
        rollout_log_probs: float32 [N], the engine's, over the kept set.
        rollout_full_log_probs: float32 [N], the engine's, over the vocabulary; NaN where absent.
        log_probs: float32 [N], the trainer's; NaN where absent.

    All have N entries; `parquet` sees to it.
    """
    trained = loss_masks == 1
    sizes = set_sizes[trained & (status == NucleusStatus.KEPT)]
    num_tokens = int(trained.sum())
    without = _difference(rollout_full_log_probs, rollout_log_probs, trained)
    with np.errstate(over="ignore"):  # Log-probs above 0 may give an infinite mass: no figure.
        mass = np.exp(without)
    with_replay = _difference(log_probs, rollout_log_probs, trained)
    return NucleusStats(
        num_tokens=num_tokens,
        num_kept=sizes.size,
        num_no_filter=int((trained & (status == NucleusStatus.NO_FILTER)).sum()),
        num_truncated=int((trained & (status == NucleusStatus.TRUNCATED)).sum()),
        mean_size=float(sizes.mean()) if sizes.size else None,
        median_size=float(np.median(sizes)) if sizes.size else None,
        p99_size=float(np.percentile(sizes, 99)) if sizes.size else None,
        singleton_fraction=float((sizes == 1).mean()) if sizes.size else None,
        wire_bytes_per_token=(
            float((4 * set_sizes[trained].sum() + 5 * num_tokens) * 4 / 3 / num_tokens)
            if num_tokens
            else None
        ),
        mean_kept_mass=_mean(mass),
        mean_log_ratio_without_replay=_mean(without),
        max_log_ratio_without_replay=float(np.abs(without).max()) if without.size else None,
        mean_log_ratio_with_replay=_mean(with_replay),
        max_log_ratio_with_replay=float(np.abs(with_replay).max()) if with_replay.size else None,
    )


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    mean = float(values.mean()) if values.size else math.inf
    return mean if math.isfinite(mean) else None


def _difference(
    left: Floats | None, right: Floats | None, trained: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    if left is None or right is None:
        return np.zeros(0)
    difference = left.astype(np.float64) - right.astype(np.float64)
    return np.asarray(difference[trained & np.isfinite(difference)])
