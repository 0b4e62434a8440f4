"""The answer: the frozen plan, its per-rank view and its digest.

A plan is stored as one list of samples and the offsets of its micro-batches (CSR), rank by rank.

Invariants: the arrays are the ones of `schedule-plan.v1`, int64 and read-only; the digest covers
them and the number of ranks and nothing else, so it is the same in every process and on every
platform; `stats` and `settings` never enter it.

Axis letters: D ranks, M micro-batches of a rank over all steps, S steps, N samples of the batch.
"""

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.contract import (
    ARRAY_NAMES,
    CONTRACT_ID,
    MINOR,
    PlanArrays,
    SchedulePlanDocument,
)
from rl_schedule.contract_header import producer
from rl_schedule.document import decode_plan, settings_digest
from rl_schedule.errors import PlanDocumentError, ScheduleError
from rl_schedule.statistics import ScheduleStats

__all__ = ["RankView", "SamplePlacement", "SchedulePlan", "plan_digest"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankView:
    """What one data-parallel rank needs of a plan; small, picklable."""

    rank: int
    """Data-parallel rank, 0-based."""
    partition: IntArray
    """int64 [local samples]: rollout positions of this rank, in micro-batch order of all steps."""
    micro_batch_indices: list[IntArray]
    """One int64 array per micro-batch, flat over steps: 0-based indices INTO `partition`.

    Empty for a filler.
    """
    num_microbatches: tuple[int, ...]
    """[S]: micro-batches of each step."""
    global_batch_sizes: tuple[int, ...]
    """[S]: rollouts of each step over all ranks."""
    digest: str
    """Digest of the whole plan, to be compared over ranks before a batch starts."""

    def steps(self) -> list[list[IntArray]]:
        """Return the rollout positions of each micro-batch, step by step; none for a filler."""
        batches = iter([self.partition[indices] for indices in self.micro_batch_indices])
        return [[next(batches) for _ in range(count)] for count in self.num_microbatches]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePlacement:
    """Where each sample of the batch runs, by rollout position; -1 for a dropped one."""

    step: IntArray
    """int64 [N]: optimizer step, 0-based."""
    data_parallel_rank: IntArray
    """int64 [N]: rank, 0-based."""
    micro_batch: IntArray
    """int64 [N]: micro-batch of that rank, 0-based inside the step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulePlan:
    """Which samples run in which micro-batch of which rank, for all steps of one rollout batch.

    Example: two ranks, one step, samples 0 and 2 on rank 0 in one micro-batch, sample 1 on rank 1:
    `sample_positions = [0, 2, 1]`, `micro_batch_offsets = [0, 2, 3]`, `num_microbatches = (1,)`.

    Two plans are equal when their digests are.
    """

    dp_size: int
    """Data-parallel ranks, D."""
    sample_positions: IntArray
    """int64 [kept samples]: rollout positions, rank by rank, in micro-batch order."""
    micro_batch_offsets: IntArray
    """int64 [D * M + 1]: micro-batch k of rank r is row r * M + k; M = `sum(num_microbatches)`."""
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
    rollout_names: tuple[str, ...] = field(default=(), repr=False)
    """Strings behind rollout ids 0, 1, ... where the caller had strings; not part of the digest."""
    settings: dict[str, Any] = field(repr=False)
    """The request without its data; not part of the digest."""
    stats: ScheduleStats
    """How good the plan is and what no plan can beat; not part of the digest."""
    digest: str = field(init=False)
    """sha256 in hex over the canonical bytes; see `plan_digest`."""

    def __post_init__(self) -> None:
        """Freeze the arrays and compute the digest."""
        for name in ("sample_positions", "micro_batch_offsets"):
            object.__setattr__(
                self, name, read_only(np.ascontiguousarray(getattr(self, name), dtype=np.int64))
            )
        object.__setattr__(self, "digest", plan_digest(self.dp_size, self.arrays()))

    def __eq__(self, other: object) -> bool:
        """Compare digests."""
        return isinstance(other, SchedulePlan) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash the digest."""
        return hash(self.digest)

    @property
    def micro_batches_per_rank(self) -> int:
        """M, the micro-batches of one rank over all steps."""
        return sum(self.num_microbatches)

    @property
    def placed_rows(self) -> IntArray:
        """Micro-batch of each entry of `sample_positions`, int64: k of rank r is r * M + k."""
        sizes = np.diff(self.micro_batch_offsets)
        return np.repeat(np.arange(sizes.size), sizes)

    @property
    def placed_steps(self) -> IntArray:
        """Step of each entry of `sample_positions`, int64."""
        step_M = np.repeat(np.arange(len(self.num_microbatches)), self.num_microbatches)
        # At least 1 only for a plan without micro-batches, in which there are no rows.
        return step_M[self.placed_rows % max(1, self.micro_batches_per_rank)]

    @property
    def partitions(self) -> list[IntArray]:
        """Per rank, int64 [local samples]: rollout positions in micro-batch order; read-only."""
        return [self.rank_view(rank).partition for rank in range(self.dp_size)]

    @property
    def micro_batch_indices(self) -> list[list[IntArray]]:
        """Per rank, one int64 array per micro-batch over all steps: indices into its partition."""
        return [self.rank_view(rank).micro_batch_indices for rank in range(self.dp_size)]

    def micro_batch_samples(self, rank: int, micro_batch: int) -> IntArray:
        """Return the rollout positions of a micro-batch, int64; `micro_batch` is over all steps.

        Raises:
            ScheduleError: no such rank or micro-batch.
        """
        self._refuse_unknown_rank(rank)
        if not _is_index(micro_batch, self.micro_batches_per_rank):
            raise ScheduleError(
                f"micro-batch {micro_batch!r} of rank {rank} does not exist in a plan with"
                f" {self.micro_batches_per_rank} micro-batches per rank, counted over all steps"
            )
        row = rank * self.micro_batches_per_rank + micro_batch
        return self.sample_positions[
            self.micro_batch_offsets[row] : self.micro_batch_offsets[row + 1]
        ]

    def placement(self) -> SamplePlacement:
        """Return step, rank and micro-batch of every sample, by rollout position."""
        rank, number = divmod(self.placed_rows, max(1, self.micro_batches_per_rank))
        # A step's first micro-batch has the number of all those before it.
        first_S = np.cumsum([0, *self.num_microbatches])
        placed = np.full(
            (3, self.sample_positions.size + len(self.dropped_samples)), -1, dtype=np.int64
        )
        placed[:, self.sample_positions] = (
            self.placed_steps,
            rank,
            number - first_S[self.placed_steps],
        )
        step_N, rank_N, micro_batch_N = map(read_only, placed)
        return SamplePlacement(step=step_N, data_parallel_rank=rank_N, micro_batch=micro_batch_N)

    def rank_view(self, rank: int) -> RankView:
        """Return what rank `rank` needs.

        Raises:
            ScheduleError: no such rank.
        """
        self._refuse_unknown_rank(rank)
        count = self.micro_batches_per_rank
        offsets = self.micro_batch_offsets[rank * count : (rank + 1) * count + 1]
        ends = (offsets - offsets[0]).tolist()
        # One array of all local indices; a micro-batch's are a view of it.
        local = read_only(np.arange(ends[-1], dtype=np.int64))
        return RankView(
            rank=rank,
            partition=self.sample_positions[offsets[0] : offsets[-1]],
            micro_batch_indices=[local[start:end] for start, end in pairwise(ends)],
            num_microbatches=self.num_microbatches,
            global_batch_sizes=self.global_batch_sizes,
            digest=self.digest,
        )

    def _refuse_unknown_rank(self, rank: object) -> None:
        if not _is_index(rank, self.dp_size):
            raise ScheduleError(
                f"rank {rank!r} does not exist in a plan for {self.dp_size} data-parallel ranks"
            )

    def arrays(self) -> dict[str, IntArray]:
        """Return the arrays of the contract by name, int64, in the contract's order."""
        values = {name: np.asarray(getattr(self, name), dtype=np.int64) for name in ARRAY_NAMES}
        # An empty tuple of pairs has no second axis of its own.
        values["filler_micro_batches"] = values["filler_micro_batches"].reshape(-1, 2)
        return values

    def to_document(self) -> SchedulePlanDocument:
        """Return the plan as a `schedule-plan.v1` document of plain JSON values."""
        columns = {
            name: {"dtype": "int64", "shape": list(array.shape), "data": array.ravel().tolist()}
            for name, array in self.arrays().items()
        }
        return {
            "contract": CONTRACT_ID,
            "minor": MINOR,
            "producer": producer(),
            "dp_size": self.dp_size,
            "digest": self.digest,
            "settings": deepcopy(self.settings),
            "settings_digest": settings_digest(self.settings),
            "rollout_names": list(self.rollout_names),
            "stats": self.stats.to_document(),
            "arrays": cast("PlanArrays", columns),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> "SchedulePlan":
        """Rebuild a plan from a `schedule-plan.v1` document; `to_document` gives the same one back.

        Raises:
            UnsupportedContractError: another contract id.
            PlanDocumentError: anything missing, malformed or inconsistent, all problems at once.
        """
        arrays = decode_plan(document)
        content = cast("SchedulePlanDocument", document)
        # Everything the record holds as tuples; the two large columns stay arrays.
        lists = {name: array.tolist() for name, array in arrays.items()}
        plan = cls(
            dp_size=content["dp_size"],
            sample_positions=arrays["sample_positions"],
            micro_batch_offsets=arrays["micro_batch_offsets"],
            num_microbatches=tuple(lists["num_microbatches"]),
            global_batch_sizes=tuple(lists["global_batch_sizes"]),
            dropped_samples=tuple(lists["dropped_samples"]),
            dropped_rollouts=tuple(lists["dropped_rollouts"]),
            oversized_samples=tuple(lists["oversized_samples"]),
            filler_micro_batches=tuple((rank, k) for rank, k in lists["filler_micro_batches"]),
            settings=deepcopy(content["settings"]),
            rollout_names=tuple(content.get("rollout_names", ())),
            stats=ScheduleStats.from_document(content["stats"]),
        )
        if plan.digest != content["digest"]:
            raise PlanDocumentError(
                [
                    (
                        f"digest is {content['digest']} but the arrays give {plan.digest}; the"
                        " document was altered"
                    )
                ]
            )
        return plan


def _is_index(value: object, count: int) -> bool:
    """Tell whether `value` is an integer from 0 to `count` - 1; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return 0 <= int(value) < count


def plan_digest(dp_size: int, arrays: Mapping[str, IntArray]) -> str:
    """Return the sha256, in hex, of a plan.

    The bytes are a JSON header with sorted keys and no spaces (contract id, `dp_size`, the shape of
    each array), a newline, then each array's values as little-endian int64, row-major, in the order
    of `ARRAY_NAMES`.
    """
    header = {
        "contract": CONTRACT_ID,
        "dp_size": dp_size,
        "shapes": {name: list(arrays[name].shape) for name in ARRAY_NAMES},
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")) + "\n"
    state = hashlib.sha256(text.encode("ascii"))
    for name in ARRAY_NAMES:
        state.update(np.ascontiguousarray(arrays[name], dtype="<i8").tobytes())
    return state.hexdigest()
