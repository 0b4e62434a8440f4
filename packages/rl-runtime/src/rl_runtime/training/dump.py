"""Hand what was trained on to the train dump, which is written beside the training.

Axes: K local response tokens of a micro-batch.

Invariants: one file per batch, written by the writer rank, with every sample of the batch's plan;
response-aligned fields have full length; the `log_probs` in it are those of the micro-batches'
fields, never computed again; everything is copied before training goes on; a file that could not be
written ends the run, with its name, at the next batch or at `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_dump import RESPONSE_FIELDS, BackgroundWriter, RaggedArray
from rl_dump.torch import DumpTopology, save_debug_train_data
from rl_metrics.torch import gather_responses
from rl_runtime.batch.rank_batch import RankBatch
from rl_runtime.config.recipe import Recipe
from rl_runtime.config.run import in_run_folder
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.training.log_prob_provenance import LogProbProvenance
from rl_runtime.training.micro_batch import MicroBatch

__all__ = ["TrainDumper"]

_SHARE_OF_DEADLINE = 0.5
"""Share of the driver's patience after which a write or a rank is given up.

Its error then says which file it was, and not only that a rank is late.
"""


class TrainDumper:
    """The writer of train dumps: one file per batch, in the background.

    Every rank has one and calls its methods in the same order.
    """

    def __init__(self, recipe: Recipe, topology: Topology) -> None:
        """Write nothing when `dump.train` is empty."""
        seconds = recipe.cluster.actor_timeout_seconds * _SHARE_OF_DEADLINE
        self._template = in_run_folder(recipe.dump.train, recipe.run.dir)
        self._topology = topology
        self._place = DumpTopology(
            global_rank=topology.rank,
            dp_rank=topology.dp_rank,
            dp_size=topology.dp_size,
            cp_rank=topology.cp_rank,
            cp_size=topology.cp_size,
            tp_rank=topology.tp_rank,
            tp_size=topology.tp_size,
            pp_rank=topology.pp_rank,
            pp_size=topology.pp_size,
            shard_group=topology.shard_group,
            deadline_seconds=seconds,
        )
        self._metadata = LogProbProvenance.of_recipe(recipe).to_metadata()
        self._writer = BackgroundWriter(deadline_seconds=seconds)

    def check(self) -> None:
        """Raise what went wrong with an earlier file; never waits.

        Raises:
            WriteError: names the file.
        """
        self._writer.check()

    def write(self, rank_batch: RankBatch, micro_batches: Sequence[MicroBatch]) -> None:
        """Copy what a batch was trained on, after its last step, and queue the file.

        Args:
            rank_batch: what this rank received.
            micro_batches: all of the batch, in the plan's order, with their fields.

        Raises:
            DumpError: the batch does not make a dump.
            WriteError: an earlier file could not be written, or not in time.
        """
        if not self._template:
            return
        columns, plan = rank_batch.columns, rank_batch.plan
        fields = _response_fields(rank_batch, micro_batches)
        data: dict[str, Any] = {
            **{name: column for name, column in columns.items() if name not in RESPONSE_FIELDS},
            "partition": plan.partition,
            "micro_batch_indices": plan.micro_batch_indices,
            "num_microbatches": list(plan.num_microbatches),
            "global_batch_sizes": list(plan.global_batch_sizes),
            **fields,
        }
        save_debug_train_data(
            self._template,
            batch_id=rank_batch.batch_id,
            rollout_data=data,
            topology=self._place,
            gather_tensor=self._gather if self._topology.cp_size > 1 else None,
            sample_fields=[
                name for name, column in columns.items() if not isinstance(column, RaggedArray)
            ],
            response_fields=[
                *RESPONSE_FIELDS,
                *(name for name in fields if name not in RESPONSE_FIELDS),
            ],
            metadata=self._metadata,
            background=self._writer,
            **(rank_batch.whole_batch or {}),
        )

    def close(self) -> None:
        """Wait for pending files.

        Raises:
            WriteError: a file could not be written, or not in time.
        """
        self._writer.close()

    def _gather(
        self,
        pieces: Sequence[torch.Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        samples: range,
    ) -> list[torch.Tensor]:
        del samples  # Every sequence is cut by itself (zigzag), wherever it lies in its stream.
        return gather_responses(
            pieces,
            total_lengths,
            response_lengths,
            self._topology.context_parallel,
            group=self._topology.cp_group,
        )


def _response_fields(
    rank_batch: RankBatch, micro_batches: Sequence[MicroBatch]
) -> dict[str, list[torch.Tensor]]:
    """Give each response-aligned field as one local piece per sample, in the columns' order."""
    # Fillers hold no sample.
    micro_batches = [micro_batch for micro_batch in micro_batches if micro_batch.samples.size]
    computed = {name for micro_batch in micro_batches for name in micro_batch.fields}
    given = {
        name: column
        for name, column in rank_batch.columns.items()
        if name in RESPONSE_FIELDS and name not in computed and isinstance(column, RaggedArray)
    }
    fields: dict[str, list[torch.Tensor]] = {
        name: [torch.empty(0)] * len(rank_batch.plan.partition)
        for name in sorted({*computed, *given})
    }
    for micro_batch in micro_batches:
        values = micro_batch.fields | {
            name: micro_batch.local_values(column) for name, column in given.items()
        }
        for name, pieces in fields.items():
            # The K values lie sample by sample: cut them, and put each where its sample stands.
            for sample, piece in zip(
                micro_batch.samples,
                torch.split(values[name], micro_batch.counts.tolist()),
                strict=True,
            ):
                pieces[int(sample)] = piece
    return fields
