"""The answer: the frozen plan, the tree of each micro-batch, and the plan's digest.

A tree is one prefix and the responses that follow it in one micro-batch. Samples, trees and
micro-batches are three levels of offsets (CSR), rank by rank, like those of a `SchedulePlan`.

Invariants: the arrays are int64 and read-only; the digest covers them and the number of ranks and
nothing else, so it is the same in every process and on every platform.

Axis letters: D ranks, M micro-batches of a rank over all steps, S steps, N samples that run, T
trees; in one micro-batch m samples, p prefixes, L tokens.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.errors import ScheduleError
from rl_schedule.prefix.statistics import PrefixStepStats

__all__ = ["ARRAY_NAMES", "PrefixMicroBatch", "PrefixPlan", "prefix_plan_digest"]

ARRAY_NAMES: Final = (
    "sample_positions",
    "response_lengths",
    "tree_sample_offsets",
    "tree_prefix_ids",
    "tree_prefix_lengths",
    "micro_batch_offsets",
    "num_microbatches",
    "global_batch_sizes",
    "dropped_samples",
    "dropped_rollouts",
    "oversized_samples",
    "filler_micro_batches",
)
"""The arrays of a plan, in the order in which the digest reads them."""

_COLUMNS = ARRAY_NAMES[:6]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixMicroBatch:
    """The stream of one micro-batch: each prefix, followed by the responses that start with it.

    Example: samples 5 and 7 share a prefix of 3 tokens, sample 6 has one of 2; the responses have
    2, 1 and 4 tokens. The stream of 12 tokens is

        place    0 1 2 | 3 4 | 5 | 6 7 | 8 9 10 11
        tokens   prefix  of 5  of 7 prefix  of 6
        position 0 1 2 | 3 4 | 3 | 0 1 | 2 3 4 5

    `prefix_offsets = [0, 6]`, `prefix_lengths = [3, 2]`, `samples = [5, 7, 6]`, `prefix_index = [0,
    0, 1]`, `response_offsets = [3, 5, 8]`, `response_lengths = [2, 1, 4]`. Place 5 attends to 0, 1,
    2 and itself, not to 3 and 4.
    """

    samples: IntArray
    """int64 [m]: rollout positions, prefix by prefix, ascending within one."""
    prefix_index: IntArray
    """int64 [m]: which entry of the prefix arrays the sample starts with, 0-based."""
    response_offsets: IntArray
    """int64 [m]: place in the stream of the first token after the prefix, 0-based."""
    response_lengths: IntArray
    """int64 [m]: tokens after the prefix, >= 1."""
    prefix_ids: IntArray
    """int64 [p]: ids of the request, each once."""
    prefix_offsets: IntArray
    """int64 [p]: place in the stream of the prefix's first token, 0-based."""
    prefix_lengths: IntArray
    """int64 [p]: tokens of the prefix; 0 for samples that share nothing."""
    num_tokens: int
    """L, tokens of the stream."""

    def position_ids(self) -> IntArray:
        """Return the position of each token in its own sample, 0-based, int64 [L].

        Responses of one prefix all start at the prefix's length, as they do without sharing.
        """
        starts = self.prefix_lengths[self.prefix_index]
        positions = np.empty(self.num_tokens, dtype=np.int64)
        for offset, length in zip(self.prefix_offsets, self.prefix_lengths, strict=True):
            positions[offset : offset + length] = np.arange(length)
        for offset, length, start in zip(
            self.response_offsets, self.response_lengths, starts, strict=True
        ):
            positions[offset : offset + length] = np.arange(start, start + length)
        return positions

    def attention_mask(self) -> npt.NDArray[np.bool_]:
        """Return which places each place attends to, bool [L, L]; row = query, column = key.

        The definition, L^2 large: for tests and small streams. A kernel takes the offsets instead.
        """
        mask = np.zeros((self.num_tokens, self.num_tokens), dtype=np.bool_)
        for offset, length in zip(self.prefix_offsets, self.prefix_lengths, strict=True):
            end = offset + length
            mask[offset:end, offset:end] = np.tri(length, dtype=np.bool_)
        for number, offset, length in zip(
            self.prefix_index, self.response_offsets, self.response_lengths, strict=True
        ):
            end, first = offset + length, self.prefix_offsets[number]
            mask[offset:end, offset:end] = np.tri(length, dtype=np.bool_)
            mask[offset:end, first : first + self.prefix_lengths[number]] = True
        return mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixPlan:
    """Which samples run in which micro-batch of which rank, and which of them share a prefix there.

    Example: one rank, one step, one micro-batch as in `PrefixMicroBatch`: `sample_positions = [5,
    7, 6]`, `response_lengths = [2, 1, 4]`, `tree_sample_offsets = [0, 2, 3]`, `tree_prefix_lengths
    = [3, 2]`, `micro_batch_offsets = [0, 2]`.

    Two plans are equal when their digests are.
    """

    dp_size: int
    """Data-parallel ranks, D."""
    sample_positions: IntArray
    """int64 [N]: rollout positions, rank by rank, in micro-batch order, tree by tree."""
    response_lengths: IntArray
    """int64 [N]: tokens of each of them after its prefix."""
    tree_sample_offsets: IntArray
    """int64 [T + 1]: tree t owns `sample_positions[offsets[t]:offsets[t + 1]]`."""
    tree_prefix_ids: IntArray
    """int64 [T]: the prefix of each tree, an id of the request."""
    tree_prefix_lengths: IntArray
    """int64 [T]: its tokens."""
    micro_batch_offsets: IntArray
    """int64 [D * M + 1]: micro-batch k of rank r is row r * M + k and owns these trees.

    Into the tree arrays, not into `sample_positions`; M = `sum(num_microbatches)`.
    """
    num_microbatches: tuple[int, ...]
    """[S]: micro-batches of one rank in each step; the same on every rank."""
    global_batch_sizes: tuple[int, ...]
    """[S]: rollouts of each step, over all ranks."""
    dropped_samples: tuple[int, ...]
    """Rollout positions that run nowhere, ascending."""
    dropped_rollouts: tuple[int, ...]
    """Ids of the rollouts that run nowhere, in first-occurrence order."""
    oversized_samples: tuple[int, ...]
    """Rollout positions longer than the token cap, ascending, whether placed alone or dropped."""
    filler_micro_batches: tuple[tuple[int, int], ...]
    """(rank, micro-batch of that rank over all steps) of each one without samples, ascending."""
    stats: tuple[PrefixStepStats, ...]
    """[S]: how good each step is; not part of the digest."""
    digest: str = field(init=False)
    """sha256 in hex over the canonical bytes; see `prefix_plan_digest`."""

    def __post_init__(self) -> None:
        """Freeze the arrays and compute the digest."""
        for name in _COLUMNS:
            column = np.array(getattr(self, name), dtype=np.int64, order="C")
            object.__setattr__(self, name, read_only(column))
        object.__setattr__(self, "digest", prefix_plan_digest(self.dp_size, self.arrays()))

    def __eq__(self, other: object) -> bool:
        """Compare digests."""
        return isinstance(other, PrefixPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash the digest."""
        return hash(self.digest)

    @property
    def micro_batches_per_rank(self) -> int:
        """M, the micro-batches of one rank over all steps."""
        return sum(self.num_microbatches)

    @property
    def micro_batch_tokens(self) -> IntArray:
        """Tokens of each micro-batch, int64 [D, M], every prefix in it counted once."""
        # The sum up to each tree's end, read at the ends of the micro-batches.
        responses = np.concatenate([[0], np.cumsum(self.response_lengths)])
        own_T = np.diff(responses[self.tree_sample_offsets])
        up_to = np.concatenate([[0], np.cumsum(self.tree_prefix_lengths + own_T)])
        tokens: IntArray = np.diff(up_to[self.micro_batch_offsets])
        return tokens.reshape(self.dp_size, self.micro_batches_per_rank)

    def micro_batch(self, rank: int, micro_batch: int) -> PrefixMicroBatch:
        """Lay out the stream of a micro-batch; `micro_batch` counts over all steps.

        Raises:
            ScheduleError: no such rank or micro-batch, or a number that is no integer.
        """
        for name, given in (("rank", rank), ("micro_batch", micro_batch)):
            if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
                raise ScheduleError(f"{name} must be an integer, counted from 0, got {given!r:.80}")
        count = self.micro_batches_per_rank
        if not (0 <= rank < self.dp_size and 0 <= micro_batch < count):
            raise ScheduleError(
                f"there is no micro-batch {micro_batch} of rank {rank}: the plan has {self.dp_size}"
                f" ranks with {count} micro-batches each"
            )
        first, last = self.micro_batch_offsets[rank * count + micro_batch :][:2].tolist()
        ends = self.tree_sample_offsets[first : last + 1]
        responses = self.response_lengths[ends[0] : ends[-1]]
        prefixes, sizes = self.tree_prefix_lengths[first:last], np.diff(ends)
        index = np.repeat(np.arange(last - first), sizes)
        # Before a response stand the prefixes up to its own and the responses before it.
        offsets = np.cumsum(prefixes)[index] + np.cumsum(responses) - responses
        before = np.concatenate([[0], np.cumsum(responses)])[ends[:-1] - ends[0]]
        return PrefixMicroBatch(
            samples=self.sample_positions[ends[0] : ends[-1]],
            prefix_index=read_only(index.astype(np.int64)),
            response_offsets=read_only(offsets),
            response_lengths=responses,
            prefix_ids=self.tree_prefix_ids[first:last],
            prefix_offsets=read_only(np.cumsum(prefixes) - prefixes + before),
            prefix_lengths=prefixes,
            num_tokens=int(prefixes.sum() + responses.sum()),
        )

    def arrays(self) -> dict[str, IntArray]:
        """Return the arrays by name, int64, in the order of the digest."""
        values = {name: np.asarray(getattr(self, name), dtype=np.int64) for name in ARRAY_NAMES}
        # An empty tuple of pairs has no second axis of its own.
        values["filler_micro_batches"] = values["filler_micro_batches"].reshape(-1, 2)
        return values


def prefix_plan_digest(dp_size: int, arrays: dict[str, IntArray]) -> str:
    """Return the sha256, in hex, of a plan.

    The bytes are a JSON header with sorted keys and no spaces (kind, `dp_size`, the shape of each
    array), a newline, then each array's values as little-endian int64, row-major, in the order of
    `ARRAY_NAMES`.
    """
    header: dict[str, Any] = {
        "kind": "prefix-plan",
        "dp_size": dp_size,
        "shapes": {name: list(arrays[name].shape) for name in ARRAY_NAMES},
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")) + "\n"
    state = hashlib.sha256(text.encode("ascii"))
    for name in ARRAY_NAMES:
        state.update(np.ascontiguousarray(arrays[name], dtype="<i8").tobytes())
    return state.hexdigest()
