"""What of the trainer's batch goes into the train dump, and which rank does what."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_dump.background import BackgroundWriter
from rl_dump.columns.column_types import build_columns
from rl_dump.contract import FIELD_RULES, RESPONSE_FIELDS, TRAIN_DUMP, DroppedSample
from rl_dump.errors import DumpError
from rl_dump.templates import resolve_template
from rl_dump.torch.columns import CHUNK_BYTES, CpuColumns, is_sample_list, to_cpu_columns
from rl_dump.torch.restore import GatherTensor, restore_context_parallel_fields_to_cpu
from rl_dump.torch.shards import Shard, write_shards
from rl_dump.torch.topology import DumpTopology

__all__ = ["SHARD_KEYS", "save_debug_train_data"]

SHARD_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
"""Keys of the trainer's batch that describe the shard, not its samples."""


def save_debug_train_data(
    template: str | os.PathLike[str],
    *,
    batch_id: int | str,
    rollout_data: Mapping[str, Any],
    topology: DumpTopology,
    gather_tensor: GatherTensor | None = None,
    sample_fields: Iterable[str] = (),
    response_fields: Iterable[str] = RESPONSE_FIELDS,
    schedule: Mapping[str, Any] | None = None,
    raw_reward: Iterable[float] | None = None,
    dropped: Sequence[DroppedSample] = (),
    metadata: Mapping[str, Any] | None = None,
    background: BackgroundWriter | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Path | None:
    """Write one batch's train dump from all ranks; every rank calls this after its last step.

    Values are copied before the call returns: training may go on while `background` writes.

    Args:
        template: path with `{batch_id}`.
        batch_id: the batch counter.
        rollout_data: this rank's batch. Per-sample: the contract's fields, `response_fields` and
            `sample_fields`, and every `RaggedArray` or list of tensors. `SHARD_KEYS` describe the
            shard: `partition` (N rollout positions), `micro_batch_indices` (per micro-batch the
            local samples, flat over steps), `num_microbatches` and `global_batch_sizes` (per step).
            Anything else is kept in the shard's entry of `dp_shards`; nothing is told apart by its
            length.
        topology: this rank's place and the group over the shard senders.
        gather_tensor: joins context-parallel pieces; None if `cp_size` is 1.
        sample_fields: further per-sample fields held as plain lists or arrays.
        response_fields: fields with one value per response token, restored over the context group.
        schedule: the plan document; the writer's counts.
        raw_reward: rewards before normalisation of the whole batch; the writer's count.
        dropped: samples not trained on, with the reason; the writer's count.
        metadata: anything else; the writer's counts.
        background: does the sending and writing; None does both before returning.
        chunk_bytes: most bytes restored on the device at a time.

    Returns:
        The path on the writer, None on every other rank.

    Raises:
        DumpError: the batch does not make a dump; every shard sender raises.
        WriteError: the file system refused or a rank did not answer; an earlier background write
            that failed is raised here, too.
    """
    path = resolve_template(template, batch_id=batch_id)
    if background is not None:
        background.check()
    if not topology.takes_part:
        return None
    _check_gather(topology, gather_tensor)
    registry = tuple(response_fields)
    restored = restore_context_parallel_fields_to_cpu(
        rollout_data,
        gather_tensor,
        keep_restored=topology.is_shard_sender,
        response_fields=registry,
        chunk_bytes=chunk_bytes,
    )
    if not topology.is_shard_sender:
        return None
    header = {
        "contract": TRAIN_DUMP,
        "batch_id": batch_id,
        "writer_rank": topology.global_rank,
        "schedule": schedule,
        "raw_reward": None if raw_reward is None else [float(reward) for reward in raw_reward],
        "dropped": list(dropped),
        "metadata": metadata,
    }
    shard = _shard(rollout_data, restored, topology, frozenset(sample_fields), registry)
    job = partial(write_shards, path, shard, topology, header)
    if background is None:
        job()
    else:
        background.submit(job, path=path)
    return path if topology.is_writer else None


def _check_gather(topology: DumpTopology, gather_tensor: GatherTensor | None) -> None:
    if topology.cp_size > 1 and gather_tensor is None:
        raise DumpError(
            f"rank {topology.global_rank}: cp_size is {topology.cp_size}, so gather_tensor must"
            " join the context-parallel pieces"
        )


def _shard(
    rollout_data: Mapping[str, Any],
    restored: CpuColumns,
    topology: DumpTopology,
    sample_fields: frozenset[str],
    registry: tuple[str, ...],
) -> Shard | DumpError:
    """Return this rank's shard, or what kept it from being made.

    Nothing is raised: the other shard senders wait for this one, and must hear why nothing comes.
    """
    samples, document = _divided(rollout_data, restored, {*sample_fields, *registry}, topology)
    count = len(rollout_data["response_lengths"])
    try:
        places = _places(document, topology, count)
        columns = to_cpu_columns(
            {**samples, **{name: places[name] for name in places if name not in samples}}
        )
        built = build_columns(
            {**columns.values, **restored.values},
            response_fields=registry,
            dtypes={**columns.dtypes, **restored.dtypes},
        )
    except DumpError as error:
        return error
    indices = built.get("sample_index")
    document["sample_indices"] = (
        None if indices is None else [indices.item(row) for row in range(count)]
    )
    document.setdefault("partition", None)
    return Shard(columns=built, document=document)


def _divided(
    rollout_data: Mapping[str, Any],
    restored: CpuColumns,
    named: set[str],
    topology: DumpTopology,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell the fields of samples from what describes the shard."""
    document: dict[str, Any] = {
        "rank": topology.global_rank,
        "data_parallel_rank": topology.dp_rank,
    }
    samples: dict[str, Any] = {}
    for name, value in rollout_data.items():
        if name in restored.values or value is None:
            continue
        is_field = name in FIELD_RULES or name in named or is_sample_list(value)
        if is_field and name not in SHARD_KEYS:
            samples[name] = value
        else:
            document[name] = _plain(value)
    return samples, document


def _places(document: Mapping[str, Any], topology: DumpTopology, count: int) -> dict[str, Any]:
    """Say where each local sample ran: int64 [N] columns from the shard's keys."""
    found: dict[str, Any] = {"data_parallel_rank": np.full(count, topology.dp_rank, np.int64)}
    if document.get("partition") is not None:
        found["rollout_position"] = np.asarray(document["partition"], np.int64)
    indices, per_step = document.get("micro_batch_indices"), document.get("num_microbatches")
    if indices is None or per_step is None:
        return found
    if sum(per_step) != len(indices):
        raise DumpError(
            f"data-parallel rank {topology.dp_rank}: {len(indices)} micro_batch_indices,"
            f" num_microbatches adds up to {sum(per_step)}"
        )
    step, micro_batch = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    places = [(step_id, slot) for step_id, slots in enumerate(per_step) for slot in range(slots)]
    for (step_id, slot), rows in zip(places, indices, strict=True):
        step[list(rows)], micro_batch[list(rows)] = step_id, slot
    if (step < 0).any():
        raise DumpError(
            f"data-parallel rank {topology.dp_rank}: local sample"
            f" {int(np.flatnonzero(step < 0)[0])} is in no micro-batch"
        )
    return {**found, "step": step, "micro_batch": micro_batch}


def _plain(value: Any) -> Any:
    """Turn tensors and arrays of a shard's entry into lists: it holds few numbers, for people."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
