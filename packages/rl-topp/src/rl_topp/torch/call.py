"""One scoring call: what it takes, checked, and which of its rows are scored how.

Decided once per call, on the host, before any number is computed; the same in forward and backward.

Axes: T rows of a call, V_local ids of a shard, K kinds of score.

Invariants: whatever does not fit is a `NucleusError`; no check reads a tensor's values, so none
waits for the device; a row without a log-prob is in no list; a row's main score comes from exactly
one of `with_nucleus` and `unfiltered`; `dense` holds `unfiltered`, and every scored row when full
scores are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, NucleusStatus, OnTruncated
from rl_topp.torch.scores import NucleusScores
from rl_topp.validation import check_count

__all__ = [
    "Call",
    "check_rows",
    "check_targets",
    "check_tensors",
    "make_call",
]

_TARGET_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Settings of one call, the same in forward and backward."""

    rows: NucleusSet
    """Kept sets of the T rows."""
    with_nucleus: npt.NDArray[np.int64]
    """Numbers, ascending, of rows with a complete kept set (status 0)."""
    unfiltered: npt.NDArray[np.int64]
    """Numbers of rows scored over the vocabulary.

    Status 1; status 3 under `on_truncated="full"`.
    """
    dense: npt.NDArray[np.int64]
    """Numbers of rows that need the whole vocabulary."""
    vocab_start: int
    """First id of the shard."""
    num_local_ids: int
    """Ids of the vocabulary that the shard holds; what it holds beyond them is padding."""
    temperature: float
    """Divisor of the logits."""
    full_log_probs: bool
    """Whether log-probs over the vocabulary are wanted."""
    entropy: bool
    """Whether the entropy over the kept set is wanted."""
    full_entropy: bool
    """Whether the entropy over the vocabulary is wanted."""
    tp_group: dist.ProcessGroup | None
    """Ranks that hold the other shards."""

    @property
    def num_kinds(self) -> int:
        """Kinds of score computed: 1, or 2 where a score over the vocabulary is wanted too."""
        return 1 + (self.full_log_probs or self.full_entropy)

    def scores(self, log_probs_KT: Tensor, entropy_KT: Tensor | None) -> NucleusScores:
        """Give computed scores their public names, and only those that were asked for."""
        return NucleusScores(
            log_probs=log_probs_KT[0],
            full_log_probs=log_probs_KT[1] if self.full_log_probs else None,
            entropy=entropy_KT[0] if self.entropy and entropy_KT is not None else None,
            full_entropy=entropy_KT[1] if self.full_entropy and entropy_KT is not None else None,
        )


def make_call(
    rows: NucleusSet,
    targets_T: Tensor,
    *,
    num_rows: int,
    shard_size: int,
    vocab_start: int,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    on_truncated: OnTruncated,
    full_log_probs: bool,
    entropy: bool,
    full_entropy: bool,
) -> Call:
    """Check what every scoring function takes, and sort the rows.

    Args:
        rows: kept sets of the T rows.
        targets_T: integers [T].
        num_rows: T, of the logits or hidden states.
        shard_size: ids and padding that the shard holds.
        vocab_start: first id of the shard.
        tp_group: see `Call`.
        temperature: see `Call`.
        on_truncated: what a row with an incomplete set is worth.
        full_log_probs: whether log-probs over the vocabulary are wanted.
        entropy: whether the entropy over the kept set is wanted.
        full_entropy: whether the entropy over the vocabulary is wanted.

    Raises:
        NucleusError: something does not fit.
    """
    check_rows(rows, num_rows=num_rows, temperature=temperature)
    check_targets(targets_T, num_rows=len(rows))
    check_count(vocab_start, "vocab_start")
    # With a group, that its shards hold every id once is up to the caller: checking it would cost a
    # collective. Without one nobody else adds the rest.
    if tp_group is None and (vocab_start > 0 or shard_size < rows.vocab_size):
        raise NucleusError(
            f"this shard holds the ids [{vocab_start}, {vocab_start + shard_size}) of a vocabulary"
            f" of {rows.vocab_size}; pass the tp_group whose ranks hold the others"
        )
    has_nucleus = rows.status == NucleusStatus.KEPT
    unfiltered = rows.scored_mask(on_truncated=on_truncated) & ~has_nucleus
    sampled = rows.status != NucleusStatus.NOT_SAMPLED
    return Call(
        rows=rows,
        with_nucleus=np.flatnonzero(has_nucleus),
        unfiltered=np.flatnonzero(unfiltered),
        dense=np.flatnonzero(sampled if full_log_probs or full_entropy else unfiltered),
        vocab_start=vocab_start,
        num_local_ids=int(np.clip(rows.vocab_size - vocab_start, 0, shard_size)),
        temperature=float(temperature),
        full_log_probs=full_log_probs,
        entropy=entropy,
        full_entropy=full_entropy,
        tp_group=tp_group,
    )


def check_tensors(**tensors: object) -> None:
    """Check that each named argument is a tensor that holds numbers, all on one device."""
    NucleusError.raise_where(
        {
            f"{name} must be a torch tensor, got {type(value).__name__}": not isinstance(
                value, Tensor
            )
            for name, value in tensors.items()
        }
    )
    devices = {name: value.device for name, value in tensors.items() if isinstance(value, Tensor)}
    where = f"{', '.join(devices)} lie on {', '.join(map(str, devices.values()))}"
    NucleusError.raise_where(
        {
            f"{where}; expected one device": len(set(devices.values())) > 1,
            f"{where}, where there are no numbers to score": (
                "meta" in {device.type for device in devices.values()}
            ),
        }
    )


def check_targets(targets_T: Tensor, *, num_rows: int) -> None:
    """Check that `targets_T` names one id per row, as integers [num_rows]."""
    is_flat = targets_T.dim() == 1
    NucleusError.raise_where(
        {
            f"targets must be integers ({', '.join(map(str, _TARGET_DTYPES))}), got"
            f" {targets_T.dtype}": targets_T.dtype not in _TARGET_DTYPES,
            f"targets must have shape [T], got {list(targets_T.shape)}": not is_flat,
            f"got {targets_T.numel()} targets for {num_rows} rows": (
                is_flat and targets_T.numel() != num_rows
            ),
        }
    )


def check_rows(rows: NucleusSet, *, num_rows: int, temperature: float) -> None:
    """Check the kept sets of a call and how they are scored."""
    if not isinstance(rows, NucleusSet):
        raise NucleusError(
            f"rows must be a NucleusSet, got {type(rows).__name__}; see NucleusSet.from_lists and"
            " rl_topp.align_rows"
        )
    NucleusError.raise_where(
        {
            f"got kept sets of {len(rows)} rows for {num_rows} rows of logits or hidden states;"
            " align them with rl_topp.align_rows": len(rows) != num_rows,
            f"temperature must be positive and finite, a plain number, got {temperature!r}; greedy"
            " sampling has kept sets of one id, score it at temperature 1": not _is_positive(
                temperature
            ),
        }
    )


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and 0.0 < float(value) < math.inf
    )
