"""What a process group means here: its size, this rank in it, the device its collectives want.

`None` is the default group; without an initialised process group it is this process alone, so that
the same code runs in a notebook.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl_metrics.errors import MetricsError

__all__ = [
    "collective_device",
    "group_members",
    "group_rank",
    "group_size",
    "has_no_group",
    "is_alone",
]


def has_no_group(group: dist.ProcessGroup | None) -> bool:
    """Say whether this process stands for itself: no group was given and none was initialised."""
    return group is None and not (dist.is_available() and dist.is_initialized())


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Say whether a collective over the group would have nobody to talk to."""
    return group_size(group) == 1


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 without any process group.

    Raises:
        MetricsError: when `group` is no process group, or this process does not belong to it, so
            that its collectives would do nothing.
    """
    if has_no_group(group):
        return 1
    given: object = group
    if not (
        given is None
        or (dist.is_available() and isinstance(given, dist.ProcessGroup))
        or given == dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise MetricsError(
            f"group is {given!r} ({type(given).__name__}); give a process group of"
            " torch.distributed, or None for the default one"
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise MetricsError(
            f"this process (global rank {dist.get_rank()}) does not belong to the group; only its"
            " members call"
        )
    return size


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank inside the group, counted from 0; 0 without any process group."""
    return 0 if has_no_group(group) else dist.get_rank(group)


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where a value must lie to be reduced: the current GPU for NCCL alone, else the CPU."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def group_members(group: dist.ProcessGroup | None) -> list[int]:
    """Return the GLOBAL ranks of the group in its order; `[0]` without any process group."""
    return [0] if has_no_group(group) else dist.get_process_group_ranks(group)
