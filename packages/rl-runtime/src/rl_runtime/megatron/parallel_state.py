"""Where a trainer rank stands in the mesh, and the process groups of its axes.

Axes from fastest to slowest: tp, cp, dp, pp (Megatron-Core's order). The writer, which
reports, writes dumps and exports weights, is on the last pipeline stage with tp = cp = dp = 0.

Invariants: every wait in a collective has the deadline given here; the product of the axes is the
world size.
"""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl_metrics import ContextParallel
from rl_runtime.config.training import ParallelSection
from rl_runtime.errors import RuntimeSetupError

__all__ = ["Topology", "end_process_groups", "start_process_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """This rank's place, the sizes of all axes, and the groups it communicates in."""

    rank: int
    """Global rank."""
    world_size: int
    """Number of trainer ranks."""
    tp_rank: int
    """Tensor-parallel rank."""
    tp_size: int
    """Tensor-parallel ranks."""
    cp_rank: int
    """Context-parallel rank."""
    cp_size: int
    """Context-parallel ranks."""
    dp_rank: int
    """Data-parallel rank, without context parallelism."""
    dp_size: int
    """Data-parallel ranks, without context parallelism."""
    pp_rank: int
    """Pipeline stage."""
    pp_size: int
    """Pipeline stages."""
    device: torch.device
    """Where this rank's tensors live."""
    tp_group: dist.ProcessGroup
    """Ranks that share this rank's layers and tokens."""
    cp_group: dist.ProcessGroup
    """Ranks that share this rank's sequences."""
    dp_group: dist.ProcessGroup
    """Ranks with the same weights and the same place in the sequence."""
    dp_cp_group: dist.ProcessGroup
    """Ranks with the same weights."""
    pp_group: dist.ProcessGroup
    """The stages of this rank's pipeline."""
    shard_group: dist.ProcessGroup | None
    """Gloo group of the ranks that send shards of a dump; None elsewhere.

    They are on the last stage with tp = cp = 0, in data-parallel order.
    """

    @property
    def context_parallel(self) -> ContextParallel:
        """This rank's place in its context-parallel group."""
        return ContextParallel(self.cp_size, self.cp_rank)

    def dp_rank_of(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the writer, which writes dumps and exports weights."""
        return self.is_last_stage and self.tp_rank == self.cp_rank == self.dp_rank == 0


def start_process_groups(
    parallel: ParallelSection,
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_seconds: float,
) -> Topology:
    """Join the world and build the groups of every axis.

    Args:
        parallel: sizes of the axes.
        rank: this process's rank.
        world_size: number of processes.
        rendezvous: "host:port" where rank 0 listens.
        timeout_seconds: deadline of every collective.

    Returns:
        This rank's place.

    Raises:
        RuntimeSetupError: the axes do not multiply to the world size.
    """
    if parallel.world_size != world_size:
        raise RuntimeSetupError(
            f"rank {rank}: {world_size} trainer ranks were started, but [parallel] asks for"
            f" {parallel.world_size}"
        )
    has_gpu = torch.cuda.is_available()
    timeout = dt.timedelta(seconds=timeout_seconds)
    if has_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"tcp://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        distributed_timeout_minutes=max(1, math.ceil(timeout_seconds / 60)),
        create_gloo_process_groups=False,
    )
    if has_gpu:
        # Sequence parallelism forks this stream; the model has no dropout, so the seed changes
        # nothing.
        model_parallel_cuda_manual_seed(0)
    first = (parallel.pipeline - 1) * parallel.data * parallel.context * parallel.tensor
    senders = [
        first + dp_rank * parallel.context * parallel.tensor for dp_rank in range(parallel.data)
    ]
    shard_group = dist.new_group(senders, backend="gloo", timeout=timeout)
    return Topology(
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor,
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=parallel.context,
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=parallel.data,
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=parallel.pipeline,
        device=(
            torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        ),
        tp_group=mpu.get_tensor_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        shard_group=shard_group if rank in senders else None,
    )


def end_process_groups() -> None:
    """Leave every group. Does nothing where none was started."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
