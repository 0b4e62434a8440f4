"""Hand what was trained on to the train dump, which is written beside the training.

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
from rl_runtime.config.run import in_run_folder
from rl_runtime.config.recipe import Recipe
from rl_runtime.training.log_prob_provenance import ScoringNote
from rl_runtime.training.micro_batch import MicroBatch, local_values
from rl_runtime.megatron.parallel_state import Topology

__all__ = ["TrainDumper", "dump_topology"]

_SHARE_OF_DEADLINE = 0.5
"""Part of the driver's patience after which a write or a rank is given up: so its error says which file it was, and not only that a rank is late."""


def dump_topology(topology: Topology, deadline_seconds: float) -> DumpTopology:
    """Describe this rank's place to rl-dump."""
    return DumpTopology(
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
        deadline_seconds=deadline_seconds,
    )


class TrainDumper:
    """Writes one file per batch, in the background.

    Every rank has one and calls its methods in the same order.
    """

    def __init__(self, recipe: Recipe, topology: Topology) -> None:
        """Write nothing when `dump.train` is empty."""
        seconds = recipe.cluster.actor_timeout_seconds * _SHARE_OF_DEADLINE
        self._template = in_run_folder(recipe.dump.train, recipe.run.dir)
        self._topology = topology
        self._place = dump_topology(topology, seconds)
        self._metadata = ScoringNote.of_recipe(recipe).to_metadata()
        self._writer = BackgroundWriter(deadline_seconds=seconds)

    def check(self) -> None:
        """Raise what went wrong with an earlier file; never waits.

        Raises:
            WriteError: names the file.
        """
        self._writer.check()

    def write(self, batch: RankBatch, micro_batches: Sequence[MicroBatch]) -> None:
        """Copy what a batch was trained on, after its last step, and queue the file.

        Args:
            batch: what this rank received.
            micro_batches: all of the batch, in the plan's order, with their fields.

        Raises:
            DumpError: the batch does not make a dump.
            WriteError: an earlier file could not be written, or not in time.
        """
        if not self._template:
            return
        data: dict[str, Any] = {
            name: column for name, column in batch.columns.items() if name not in RESPONSE_FIELDS
        }
        fields = _response_fields(batch, micro_batches)
        data |= {
            "partition": batch.plan.partition,
            "micro_batch_indices": batch.plan.micro_batch_indices,
            "num_microbatches": list(batch.plan.num_microbatches),
            "global_batch_sizes": list(batch.plan.global_batch_sizes),
        }
        save_debug_train_data(
            self._template,
            batch_id=batch.batch_id,
            rollout_data=data | fields,
            topology=self._place,
            gather_tensor=self._gather if self._topology.cp_size > 1 else None,
            sample_fields=[
                name
                for name, column in batch.columns.items()
                if not isinstance(column, RaggedArray)
            ],
            response_fields=[
                *RESPONSE_FIELDS,
                *(name for name in fields if name not in RESPONSE_FIELDS),
            ],
            metadata=self._metadata,
            background=self._writer,
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
    batch: RankBatch, micro_batches: Sequence[MicroBatch]
) -> dict[str, list[torch.Tensor]]:
    """Every response-aligned field as one local piece per sample, in the order of the rank's columns."""
    holding = [part for part in micro_batches if part.samples.size]
    computed = {name for part in holding for name in part.fields}
    given = {
        name: column
        for name, column in batch.columns.items()
        if name in RESPONSE_FIELDS and name not in computed and isinstance(column, RaggedArray)
    }
    pieces: dict[str, list[torch.Tensor]] = {
        name: [torch.empty(0)] * len(batch.plan.partition) for name in sorted({*computed, *given})
    }
    for part in holding:
        values = {
            **part.fields,
            **{name: local_values(column, part) for name, column in given.items()},
        }
        for name, items in pieces.items():
            for sample, piece in zip(
                part.samples, torch.split(values[name], part.counts.tolist()), strict=True
            ):
                items[int(sample)] = piece
    return pieces
