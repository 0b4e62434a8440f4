"""How bytes travel between shard senders: length first, every wait with a deadline."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from rl_dump.errors import WriteError
from rl_dump.torch.topology import DumpTopology

__all__ = ["receive_bytes", "send_bytes"]


def send_bytes(data: bytes | memoryview, peer: int, topology: DumpTopology) -> None:
    """Send bytes to the shard sender of data-parallel rank `peer`.

    Raises:
        WriteError: it did not take them before the deadline, or is gone.
    """
    size = torch.tensor([len(data)], dtype=torch.int64)
    _move(size, peer, topology, send=True)
    if len(data):
        _move(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), peer, topology, send=True)


def receive_bytes(peer: int, topology: DumpTopology) -> memoryview:
    """Receive what the shard sender of data-parallel rank `peer` sends next.

    Raises:
        WriteError: nothing came before the deadline, or the sender is gone.
    """
    size = torch.zeros(1, dtype=torch.int64)
    _move(size, peer, topology, send=False)
    data = torch.empty(int(size.item()), dtype=torch.uint8)
    if len(data):
        _move(data, peer, topology, send=False)
    return memoryview(data.numpy())


def _move(tensor: torch.Tensor, peer: int, topology: DumpTopology, *, send: bool) -> None:
    assert topology.shard_group is not None
    rank = dist.get_global_rank(topology.shard_group, peer)
    verb = "send to" if send else "receive from"
    try:
        work = (dist.isend if send else dist.irecv)(tensor, rank, group=topology.shard_group)
        assert work is not None
        done = work.wait(timedelta(seconds=topology.deadline_seconds))
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise WriteError(
            f"train dump: rank {topology.global_rank} could not {verb} data-parallel rank {peer}"
            f" (rank {rank}): {first_line}"
        ) from error
    if not done:
        raise WriteError(
            f"train dump: rank {topology.global_rank} waited {topology.deadline_seconds:g} s to"
            f" {verb} data-parallel rank {peer} (rank {rank})"
        )
