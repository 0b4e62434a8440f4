"""How a dump gets the training forward's log-probs when no other forward computes them."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from typing_extensions import Self

from rl_dump.errors import DumpError

__all__ = ["LogProbCapture"]


class LogProbCapture:
    """Each sample's log-probs from the first forward of a batch.

    A context manager around the steps.

    The first write wins: a later one comes from an updated policy. Recording detaches and copies,
    so it changes neither the graph nor any number; with `enabled=False` it does nothing.

    Args:
        enabled: whether to keep anything; False costs one comparison per call.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        """Whether anything is kept."""
        self._kept: dict[int, torch.Tensor] = {}

    def record(self, rollout_position: int, log_probs: torch.Tensor) -> None:
        """Keep one sample's log-probs, unless it has some already.

        Args:
            rollout_position: the sample's place in the flattened rollout batch.
            log_probs: this rank's part of its response: float [R_local], possibly empty.
        """
        if self.enabled and rollout_position not in self._kept:
            self._kept[int(rollout_position)] = log_probs.detach().clone()

    def collect(self, partition: Iterable[int]) -> list[torch.Tensor]:
        """Hand over what was kept, in the order of this rank's samples, and forget it.

        Args:
            partition: rollout positions of this rank's samples.

        Raises:
            DumpError: names the samples that no forward recorded.
        """
        positions = [int(position) for position in partition]
        missing = [position for position in positions if position not in self._kept]
        if missing:
            raise DumpError(
                f"no log-probs were recorded for {len(missing)} samples, the first at"
                f" rollout_position {missing[0]}; did the loss skip them?"
            )
        found = [self._kept[position] for position in positions]
        self._kept.clear()
        return found

    def __enter__(self) -> Self:
        """Start with nothing kept."""
        self._kept.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Forget everything, after an exception as well."""
        self._kept.clear()
