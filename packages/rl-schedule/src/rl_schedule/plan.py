"""The answer: the frozen plan, its per-rank view and its digest; record layer above `document` and
`statistics`.

Decides how a plan is stored (CSR, int64, read-only) and what two plans being equal means.
Invariants: the arrays are the ones of `schedule-plan.v1`; the digest covers them and the number of
ranks and nothing else, so it is the same in every process and on every platform; `stats` and
`settings` never enter it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.contract import ARRAY_NAMES, CONTRACT_ID, SchedulePlanDocument, SettingsDocument
from rl_schedule.document import decode_plan, encode_plan
from rl_schedule.errors import PlanDocumentError, ScheduleError
from rl_schedule.statistics import ScheduleStats

__all__ = ["RankView", "SamplePlacement", "SchedulePlan", "plan_digest"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankView:
    """What one data-parallel rank needs of a plan; small, picklable."""

    rank: int
    """Data-parallel rank, 0-based."""
    partition: IntArray
    """int64 [local samples]: rollout positions this rank owns, in micro-batch order over all steps."""
    micro_batch_indices: list[IntArray]
    """One int64 array per micro-batch, flat over steps: 0-based indices INTO `partition`; empty for a filler."""
    num_microbatches: tuple[int, ...]
    """[steps]: micro-batches of each step."""
    global_batch_sizes: tuple[int, ...]
    """[steps]: rollouts of each step over all ranks."""
    digest: str
    """Digest of the whole plan, to be compared over ranks before a batch starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplePlacement:
    """Where each sample runs, by rollout position; [n] over all samples of the batch, -1 for a dropped one."""

    step: IntArray
    """int64 [n]: optimizer step, 0-based."""
    data_parallel_rank: IntArray
    """int64 [n]: rank, 0-based."""
    micro_batch: IntArray
    """int64 [n]: micro-batch of that rank, 0-based inside the step."""


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
    """[steps]: micro-batches of one rank in each step; the same on every rank."""
    global_batch_sizes: tuple[int, ...]
    """[steps]: rollouts of each step, over all ranks."""
    dropped_samples: tuple[int, ...]
    """Rollout positions that run nowhere, ascending."""
    dropped_rollouts: tuple[int, ...]
    """Ids of the rollouts that run nowhere, in first-occurrence order."""
    oversized_samples: tuple[int, ...]
    """Rollout positions longer than the token cap, ascending, whether placed alone or dropped."""
    filler_micro_batches: tuple[tuple[int, int], ...]
    """(rank, micro-batch of that rank, flat over steps) of each micro-batch without samples, ascending."""
    settings: SettingsDocument = field(repr=False)
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
    def partitions(self) -> list[IntArray]:
        """Per rank, int64 [local samples]: rollout positions in micro-batch order; read-only views."""
        return [self._partition(rank) for rank in range(self.dp_size)]

    @property
    def micro_batch_indices(self) -> list[list[IntArray]]:
        """Per rank, one int64 array per micro-batch, flat over steps: 0-based indices into that rank's partition."""
        return [self._local_indices(rank) for rank in range(self.dp_size)]

    def micro_batch_samples(self, rank: int, micro_batch: int) -> IntArray:
        """Return the rollout positions of one micro-batch, int64; `micro_batch` counts over all steps."""
        row = rank * self.micro_batches_per_rank + micro_batch
        return self.sample_positions[
            self.micro_batch_offsets[row] : self.micro_batch_offsets[row + 1]
        ]

    def placement(self) -> SamplePlacement:
        """Return step, rank and micro-batch of every sample, by rollout position."""
        count, num_samples = (
            self.micro_batches_per_rank,
            self.sample_positions.size + len(self.dropped_samples),
        )
        rows = np.repeat(
            np.arange(self.micro_batch_offsets.size - 1), np.diff(self.micro_batch_offsets)
        )
        steps = np.repeat(np.arange(len(self.num_microbatches)), self.num_microbatches)
        in_step = np.concatenate(
            [np.empty(0, dtype=np.int64), *(np.arange(size) for size in self.num_microbatches)]
        )
        step, rank, micro_batch = (np.full(num_samples, -1, dtype=np.int64) for _ in range(3))
        if count:
            rank[self.sample_positions] = rows // count
            step[self.sample_positions], micro_batch[self.sample_positions] = (
                steps[rows % count],
                in_step[rows % count],
            )
        return SamplePlacement(
            step=read_only(step),
            data_parallel_rank=read_only(rank),
            micro_batch=read_only(micro_batch),
        )

    def rank_view(self, rank: int) -> RankView:
        """Return what rank `rank` needs.

        Raises:
            ScheduleError: no such rank.
        """
        if not 0 <= rank < self.dp_size:
            raise ScheduleError(
                f"rank {rank} does not exist in a plan for {self.dp_size} data-parallel ranks"
            )
        return RankView(
            rank=rank,
            partition=self._partition(rank),
            micro_batch_indices=self._local_indices(rank),
            num_microbatches=self.num_microbatches,
            global_batch_sizes=self.global_batch_sizes,
            digest=self.digest,
        )

    def arrays(self) -> dict[str, IntArray]:
        """Return the arrays of the contract by name, int64, in the contract's order."""
        fillers = np.asarray(self.filler_micro_batches, dtype=np.int64).reshape(-1, 2)
        values = {
            "micro_batch_offsets": self.micro_batch_offsets,
            "sample_positions": self.sample_positions,
            "filler_micro_batches": fillers,
        }
        return {
            name: (
                values[name] if name in values else np.asarray(getattr(self, name), dtype=np.int64)
            )
            for name in ARRAY_NAMES
        }

    def to_document(self) -> SchedulePlanDocument:
        """Return the plan as a `schedule-plan.v1` document of plain JSON values."""
        return encode_plan(
            dp_size=self.dp_size,
            digest=self.digest,
            settings=self.settings,
            stats=self.stats.to_document(),
            arrays=self.arrays(),
        )

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> "SchedulePlan":
        """Rebuild a plan from a `schedule-plan.v1` document; `to_document` gives the same document
        back.

        Raises:
            UnsupportedContractError: another contract id.
            PlanDocumentError: anything missing, malformed or inconsistent, all problems at once.
        """
        decoded = decode_plan(document)
        arrays = decoded.arrays
        plan = cls(
            dp_size=decoded.dp_size,
            sample_positions=arrays["sample_positions"],
            micro_batch_offsets=arrays["micro_batch_offsets"],
            num_microbatches=tuple(arrays["num_microbatches"].tolist()),
            global_batch_sizes=tuple(arrays["global_batch_sizes"].tolist()),
            dropped_samples=tuple(arrays["dropped_samples"].tolist()),
            dropped_rollouts=tuple(arrays["dropped_rollouts"].tolist()),
            oversized_samples=tuple(arrays["oversized_samples"].tolist()),
            filler_micro_batches=tuple(
                (rank, number) for rank, number in arrays["filler_micro_batches"].tolist()
            ),
            settings=decoded.settings,
            stats=ScheduleStats.from_document(decoded.stats),
        )
        if plan.digest != decoded.digest:
            raise PlanDocumentError(
                [
                    f"digest is {decoded.digest} but the arrays give {plan.digest}; the document"
                    " was altered"
                ]
            )
        return plan

    def _partition(self, rank: int) -> IntArray:
        count = self.micro_batches_per_rank
        return self.sample_positions[
            self.micro_batch_offsets[rank * count] : self.micro_batch_offsets[(rank + 1) * count]
        ]

    def _local_indices(self, rank: int) -> list[IntArray]:
        count = self.micro_batches_per_rank
        if not count:
            return []
        offsets = self.micro_batch_offsets[rank * count : (rank + 1) * count + 1]
        local = read_only(np.arange(offsets[-1] - offsets[0], dtype=np.int64))
        ends = (offsets - offsets[0]).tolist()
        return [local[start:end] for start, end in pairwise(ends)]


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
    state = hashlib.sha256(
        json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    )
    state.update(b"\n")
    for name in ARRAY_NAMES:
        state.update(np.ascontiguousarray(arrays[name], dtype="<i8").tobytes())
    return state.hexdigest()
