"""Hand what was trained on to the train dump. Layer: training, above rl-dump.

Invariants: one file per batch, written by the writer rank, with every sample of the batch's plan; response-aligned fields have full length; the
`log_probs` in it are those of the micro-batches' fields, never computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_dump import RESPONSE_FIELDS, RaggedArray
from rl_dump.torch import DumpTopology, save_debug_train_data
from rl_metrics.torch import gather_responses
from rl_runtime.batch import RankBatch
from rl_runtime.training.batch import MicroBatch
from rl_runtime.training.parallel_state import Topology

__all__ = ["dump_topology", "save_train_dump"]


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


def save_train_dump(
    template: str, batch: RankBatch, micro_batches: Sequence[MicroBatch], topology: Topology, *, deadline_seconds: float
) -> Path | None:
    """Write the train dump of one batch. Every rank calls it after the batch's last step.

    Args:
        template: path with `{batch_id}`.
        batch: what this rank received.
        micro_batches: all of the batch, in the plan's order, with their fields.
        topology: this rank's place.
        deadline_seconds: longest wait for another rank.

    Returns:
        The path on the writer, None elsewhere.

    Raises:
        WriteError: the file could not be written.
    """
    data: dict[str, Any] = {name: column for name, column in batch.columns.items() if name not in RESPONSE_FIELDS}
    data |= _response_fields(batch, micro_batches)
    data |= {
        "partition": batch.plan.partition,
        "micro_batch_indices": batch.plan.micro_batch_indices,
        "num_microbatches": list(batch.plan.num_microbatches),
        "global_batch_sizes": list(batch.plan.global_batch_sizes),
    }
    scalars = [name for name, column in batch.columns.items() if not isinstance(column, RaggedArray)]

    def gather(pieces: Sequence[torch.Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[torch.Tensor]:
        return gather_responses(pieces, total_lengths, response_lengths, topology.context_parallel, group=topology.cp_group)

    return save_debug_train_data(
        template,
        batch_id=batch.batch_id,
        rollout_data=data,
        topology=dump_topology(topology, deadline_seconds),
        gather_tensor=gather if topology.cp_size > 1 else None,
        sample_fields=scalars,
    )


def _response_fields(batch: RankBatch, micro_batches: Sequence[MicroBatch]) -> dict[str, list[torch.Tensor]]:
    """Every response-aligned field as one local piece per sample, in the order of the rank's columns."""
    names = sorted({name for part in micro_batches if part.samples.size for name in part.fields})
    pieces: dict[str, list[torch.Tensor]] = {name: [torch.empty(0)] * len(batch.plan.partition) for name in names}
    for part in micro_batches:
        for name in names if part.samples.size else ():
            for sample, piece in zip(part.samples, torch.split(part.fields[name], part.counts.tolist()), strict=True):
                pieces[name][int(sample)] = piece
    return pieces
