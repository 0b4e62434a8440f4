"""`[cluster]`: Ray."""

from __future__ import annotations

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["ClusterSection"]


class ClusterSection(Section):
    """Which Ray cluster runs the actors and how much of it they take."""

    address: str = ""
    """Address of an existing Ray cluster ("auto" finds one).

    Empty: start one on this machine and stop it at the end.
    """

    colocate: bool = True
    """Engines and trainers share the same devices."""

    cpus_per_trainer: float = Field(default=0.5, ge=0)
    """CPU cores that Ray counts for one trainer actor.

    Fractions let more actors than cores be placed.
    """

    cpus_per_engine: float = Field(default=0.5, ge=0)
    """CPU cores that Ray counts for one engine actor."""

    threads_per_trainer: int = Field(default=1, ge=1)
    """OpenMP threads of one trainer process."""

    object_store_bytes: int = Field(default=256 * 2**20, ge=80 * 2**20)
    """Shared memory of the object store of a cluster that the run starts, in bytes."""

    placement_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait for the placement group before giving up, in seconds."""

    actor_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long to wait for an actor to start or to finish one call, in seconds."""
