"""Slow float64 definitions of everything the package computes fast.

Invariants: one plain loop over tokens per function, no shared code with the fast paths; fast paths
are tested against these.

Tie rule of `nucleus`: candidates are ranked by probability, highest first, and among equal
probabilities by id, lowest first. The three filters act together on the same probabilities: rank
below top_k, mass before the candidate at most top_p, probability at least min_p times the highest.
So a candidate that reaches top_p exactly still lets the next one in, and at least one id is always
kept. A top_p of 1 filters nothing, whatever rounding makes of the masses.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated
from rl_topp.validation import refuse_first

__all__ = [
    "ReferenceScores",
    "keep_mask",
    "nucleus",
    "nucleus_of_logits",
    "nucleus_scores",
    "score_gradient",
    "softmax",
]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores:
    """Scores of T tokens; 0 where a token has no score. All float64 [T], nats."""

    log_probs: Floats
    """log p of the sampled id over its kept set (over the vocabulary where no filter applied)."""
    full_log_probs: Floats
    """log p of the sampled id over the vocabulary."""
    entropy: Floats
    """-sum p log p over the kept set."""
    full_entropy: Floats
    """-sum p log p over the vocabulary."""


def softmax(logits: npt.ArrayLike, *, temperature: float = 1.0) -> Floats:
    """Return exp(z - logsumexp(z)), z = logits / temperature, over the last axis; -inf gives 0."""
    z = np.asarray(logits, np.float64) / temperature
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def nucleus(
    probs: npt.ArrayLike, *, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.int32]:
    """Return the ids that survive top-k, top-p and min-p, highest probability first.

    Example: probs [0.5, 0.3, 0.1, 0.06, 0.04] at top_p 0.85 keep [0, 1, 2]: the masses before them
    are 0, 0.5, 0.8; before id 3 it is 0.9.

    Args:
        probs: [V], V >= 1, sums to 1.
        top_k: at least 1; None = all.
        top_p: in (0, 1].
        min_p: in [0, 1], relative to the highest probability.

    Returns:
        int32 [n], n >= 1.

    Raises:
        NucleusError: a parameter outside its range, or a probability that is NaN, infinite or
            negative.
    """
    p = np.asarray(probs, np.float64)
    is_in_range = (top_k is None or top_k >= 1) and 0.0 < top_p <= 1.0 and 0.0 <= min_p <= 1.0
    NucleusError.raise_where(
        {
            f"need top_k >= 1, 0 < top_p <= 1, 0 <= min_p <= 1; got top_k={top_k}, top_p={top_p},"
            f" min_p={min_p}": not is_in_range,
            f"probs must have shape [V] with V >= 1, got {list(p.shape)}": (
                p.ndim != 1 or p.size == 0
            ),
        }
    )
    refuse_first(
        ~(np.isfinite(p) & (p >= 0)),
        lambda id_: f"probs[{id_}] is {p[id_]}, expected a finite number of at least 0",
    )
    order = np.argsort(-p, kind="stable")
    ranked = p[order]
    mass_before = np.cumsum(ranked) - ranked
    keep = ranked >= min_p * ranked[0]
    if top_p < 1.0:
        keep &= mass_before <= top_p
    if top_k is not None:
        keep[top_k:] = False
    keep[0] = True
    return np.asarray(order[keep], np.int32)


def nucleus_of_logits(
    logits: npt.ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> NucleusSet:
    """Return the kept sets of T rows of logits [T, V], all with status 0."""
    probs = softmax(logits, temperature=temperature)
    return NucleusSet.from_lists(
        [nucleus(row, top_k=top_k, top_p=top_p, min_p=min_p) for row in probs],
        vocab_size=probs.shape[-1],
    )


def keep_mask(
    rows: NucleusSet, targets: npt.ArrayLike, *, on_truncated: OnTruncated = "mask"
) -> npt.NDArray[np.bool_]:
    """Return bool [T, V]: the support each token is normalised over.

    Status 0: its ids and its target. Status 1, and status 3 under `on_truncated="full"`:
    everything. Otherwise nothing.
    """
    wanted = np.asarray(targets, np.int64)
    has_nucleus = rows.status == NucleusStatus.KEPT
    mask = np.zeros((len(rows), rows.vocab_size), np.bool_)
    mask[rows.scored_mask(on_truncated=on_truncated) & ~has_nucleus] = True
    for token in np.flatnonzero(has_nucleus):
        mask[token, rows[token]] = True
        mask[token, wanted[token]] = True
    return mask


def nucleus_scores(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    rows: NucleusSet,
    *,
    temperature: float = 1.0,
    on_truncated: OnTruncated = "mask",
) -> ReferenceScores:
    """Score the sampled ids.

    log p = z[y] - logsumexp(z[S]) with z = logits / temperature and S the support of `keep_mask`;
    full scores take S = the vocabulary.

    Example: probs [0.5, 0.3, 0.1, 0.06, 0.04], kept [0, 1, 2], sampled 1: log(0.3 / 0.9) = -1.0986;
    full: log 0.3 = -1.2040.

    Args:
        logits: [T, V].
        targets: integers [T]; anything where the status is 2.
        rows: T tokens over V ids.
        temperature: divisor of the logits, > 0.
        on_truncated: see `NucleusSet.scored_mask`.
    """
    z = np.asarray(logits, np.float64) / temperature
    wanted = np.asarray(targets, np.int64)
    support = keep_mask(rows, wanted, on_truncated=on_truncated)
    scores = ReferenceScores(**{name: np.zeros(len(rows)) for name in ReferenceScores.__slots__})
    for token in range(len(rows)):
        if support[token].any():
            scores.log_probs[token], scores.entropy[token] = _row_scores(
                z[token], int(wanted[token]), support[token]
            )
        if rows.status[token] != NucleusStatus.NOT_SAMPLED:
            everything = np.ones(z.shape[-1], np.bool_)
            scores.full_log_probs[token], scores.full_entropy[token] = _row_scores(
                z[token], int(wanted[token]), everything
            )
    return scores


def _row_scores(z: Floats, target: int, support: npt.NDArray[np.bool_]) -> tuple[float, float]:
    kept = z[support]
    highest = kept.max()
    log_normaliser = highest + np.log(np.exp(kept - highest).sum())
    p = np.exp(kept - log_normaliser)
    positive = p > 0  # p log p -> 0 as p -> 0
    return float(z[target] - log_normaliser), float(
        -(p[positive] * (kept[positive] - log_normaliser)).sum()
    )


def score_gradient(
    logits: npt.ArrayLike,
    targets: npt.ArrayLike,
    support: npt.NDArray[np.bool_],
    *,
    temperature: float = 1.0,
    of_entropy: bool = False,
) -> Floats:
    """Return the derivative of each row's log-prob (or entropy) with respect to its logits, [T, V].

    d log p / d z_v = [v = y] - p_v and d H / d z_v = -p_v (log p_v + H) for v in the support, 0
    elsewhere; the logits add a factor 1 / temperature.

    Args:
        logits: [T, V].
        targets: integers [T].
        support: bool [T, V], from `keep_mask`; rows without True get 0.
        temperature: divisor of the logits.
        of_entropy: the entropy's derivative instead of the log-prob's.
    """
    z = np.asarray(logits, np.float64) / temperature
    wanted = np.asarray(targets, np.int64)
    gradient = np.zeros_like(z)
    for token in np.flatnonzero(support.any(axis=1)):
        p = softmax(np.where(support[token], z[token], -np.inf))
        if of_entropy:
            log_p = np.log(p, out=np.zeros_like(p), where=p > 0)
            gradient[token] = -p * (log_p - (p * log_p).sum())
        else:
            gradient[token] = -p
            gradient[token, wanted[token]] += 1.0
    return gradient / temperature
