"""From partial sums over one vocabulary shard to log-probs and entropies, for every path.

Axes: T rows, E entries, K kinds of score (0 over the support; 1 over the vocabulary, on request), 4
statistics.

Invariants: a row without a score is marked from the start (mass -1) and scores 0; whatever the
logits are, no other row does unless its log-prob is 0. A target that no shard holds scores -inf;
entropies count ids of probability 0 as 0; NaN or +inf among a support's logits gives NaN, and so
does a support of nothing but -inf, as in a softmax. Nothing waits for the device.
"""

# A shard describes each row by four numbers over the ids it holds, with z = logit / temperature:
#
#     highest  m = max z              target  z[y], or -inf when another shard holds y
#     mass     s = sum e^(z - m)      spread  w = sum e^(z - m) (z - m)
#
# `combine` reduces them over the tensor-parallel group (one MAX, one SUM all-reduce of a few
# numbers per row) and returns
#
#     log_normaliser = M + log S,    log p = z[y] - log_normaliser,    H = log S - W / S.
#
# Constants enter by `masked_fill`: `torch.where` would copy each of them to the device and wait.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "HIGHEST",
    "MASS",
    "NO_SCORE",
    "TARGET",
    "Combined",
    "NucleusScores",
    "Upstream",
    "combine",
    "compute_dtype",
    "entry_gradient",
    "new_statistics",
    "rescaled",
    "summed_entry_gradient",
    "upstream_of_kinds",
]

HIGHEST, TARGET, MASS = range(3)
"""Places of a row's statistics, see above; the spread stands last."""

NO_SCORE = -1.0
"""Mass of a row without a score; a sum of exponentials is never negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NucleusScores:
    """Scores of T rows, nats; 0 without gradient where a row has no score.

    float32 [T] each, float64 for float64 inputs. The last three are None unless asked for. A row of
    status 2 has none of the four; one of status 3 has those over the vocabulary, and the other two
    only under `on_truncated="full"`, where they are the same numbers.
    """

    log_probs: Tensor
    """log p of the target over its kept set; over the vocabulary where no filter applied."""
    full_log_probs: Tensor | None = None
    """log p of the target over the vocabulary, for every row but those of status 2."""
    entropy: Tensor | None = None
    """Entropy over the kept set; over the vocabulary where no filter applied."""
    full_entropy: Tensor | None = None
    """Entropy over the vocabulary, for every row but those of status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Finished numbers of all shards together, [K, T] each."""

    log_probs: Tensor
    """log p of the target, nats; 0 where a row has no score."""
    entropy: Tensor
    """H, nats; 0 where a row has no score."""
    log_normaliser: Tensor
    """log of the sum of e^z over the support; 0 where a row has no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Knowledge of backward about rows: gradients that arrive, what forward found; of one shape."""

    score: Tensor
    """g, dL/d(log p)."""
    entropy: Tensor | None
    """g_H, dL/dH, or None."""
    log_normaliser: Tensor
    """log of the sum of e^z over the support."""
    entropy_value: Tensor
    """H."""

    def at(self, index: Tensor) -> Upstream:
        """Return the rows `index`."""
        return Upstream(
            score=self.score[index],
            entropy=None if self.entropy is None else self.entropy[index],
            log_normaliser=self.log_normaliser[index],
            entropy_value=self.entropy_value[index],
        )

    def as_columns(self) -> Upstream:
        """Return the rows as [N, 1], to broadcast against [N, B]."""
        return Upstream(
            score=self.score[:, None],
            entropy=None if self.entropy is None else self.entropy[:, None],
            log_normaliser=self.log_normaliser[:, None],
            entropy_value=self.entropy_value[:, None],
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores of inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_statistics(
    num_kinds: int, num_rows: int, *, mass: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return statistics [K, 4, T] to merge others into, or to write them over.

    Args:
        num_kinds: K.
        num_rows: T.
        mass: 0 over no id at all; `NO_SCORE` of rows without a score.
        dtype: the computing dtype.
        device: where.
    """
    statistics = torch.zeros(num_kinds, 4, num_rows, dtype=dtype, device=device)
    statistics[:, HIGHEST : TARGET + 1].fill_(-torch.inf)
    statistics[:, MASS].fill_(mass)
    return statistics


def combine(statistics: Tensor, tp_group: dist.ProcessGroup | None) -> Combined:
    """Reduce per-shard statistics over the group and finish the scores.

    Args:
        statistics: [K, 4, T], this shard's, mass `NO_SCORE` where a row has no score; not changed.
        tp_group: ranks that hold the other shards; None = this shard is the whole vocabulary.
    """
    peak, target, mass, spread = statistics.unbind(1)
    # On every rank alike. A scored row's mass may be 0 (all -inf) or NaN: then its scores are NaN.
    unscored = mass < 0
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        peak, target, mass, spread = _reduced(statistics, tp_group)
    divisor = mass.masked_fill(unscored, 1.0)
    log_mass = torch.log(divisor)
    log_normaliser = (peak + log_mass).masked_fill_(unscored, 0.0)
    return Combined(
        log_probs=(target - log_normaliser).masked_fill_(unscored, 0.0),
        entropy=log_mass - spread / divisor,  # 0 where there is no score, hence no spread.
        log_normaliser=log_normaliser,
    )


def _reduced(statistics: Tensor, tp_group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return peak, target, mass and spread [K, T] over all shards of the group."""
    peaks = statistics[:, HIGHEST : TARGET + 1].clone()
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=tp_group)
    peak, target = peaks.unbind(1)
    sums = rescaled(statistics.unbind(1), peak)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=tp_group)
    return peak, target, *sums.unbind(0)


def rescaled(statistics: Sequence[Tensor], peak: Tensor) -> Tensor:
    """Return mass and spread, stacked, relative to another maximum.

    Args:
        statistics: the four of a part, of one shape.
        peak: at least the part's maximum.
    """
    highest, _, mass, spread = statistics
    nothing = mass <= 0
    # A part without ids of a row would give -inf - -inf = NaN there.
    shift = (highest - peak).masked_fill_(nothing, 0.0)
    scale = torch.exp(shift).masked_fill_(nothing, 0.0)
    return torch.stack([mass * scale, (spread + shift * mass) * scale])


def entry_gradient(z: Tensor, is_target: Tensor, upstream: Upstream) -> Tensor:
    """Return dL/dz of (row, id) entries, given what arrives from above at their rows.

    dL/dz = g ([id = y] - p) - g_H p (log p + H), and 0 where p is 0.

    Args:
        z: logit / temperature of the entries, any shape.
        is_target: whether each is its row's target.
        upstream: of the entries' rows, broadcast against `z`.
    """
    log_p = z - upstream.log_normaliser
    p = torch.exp(log_p)
    gradient = upstream.score * (is_target.to(p.dtype) - p)
    if upstream.entropy is not None:
        gradient = gradient - upstream.entropy * (
            p * (log_p + upstream.entropy_value)
        ).masked_fill_(p == 0, 0.0)
    return gradient


def upstream_of_kinds(
    score_KT: Tensor, entropy_KT: Tensor | None, log_normaliser_KT: Tensor, entropy_value_KT: Tensor
) -> tuple[Upstream, ...]:
    """Return what arrives at each kind of score, [T] each; arguments [K, T]."""
    return tuple(
        Upstream(
            score=score_KT[kind],
            entropy=None if entropy_KT is None else entropy_KT[kind],
            log_normaliser=log_normaliser_KT[kind],
            entropy_value=entropy_value_KT[kind],
        )
        for kind in range(score_KT.shape[0])
    )


def summed_entry_gradient(
    z_E: Tensor, is_target_E: Tensor, rows_E: Tensor, kinds: Sequence[Upstream]
) -> Tensor:
    """Return dL/dz [E] of entries of kept sets from all kinds of score together.

    The sum of `entry_gradient` over `kinds`, whose supports all hold the entries; so it takes the
    place of what one kind alone gives there.

    Args:
        z_E: logit / temperature per entry.
        is_target_E: whether each is its row's target.
        rows_E: int64 [E], the row of the call of each.
        kinds: see `upstream_of_kinds`.
    """
    first, *others = (entry_gradient(z_E, is_target_E, kind.at(rows_E)) for kind in kinds)
    return sum(others, start=first)
