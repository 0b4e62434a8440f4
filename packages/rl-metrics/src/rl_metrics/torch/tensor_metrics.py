"""Metrics whose numbers are still on a device, and how they join those of the host.

Reading a number from a device waits for everything the device has yet to do. A `TensorMetric` is
reduced without being read: its numbers are laid into the vector that travels, where it lies.

Invariants, tested: no value of a tensor is read on the host before the collective that adds it up;
the result is that of the same numbers in `rl_metrics.Metric`; numbers of one metric are added in
their order, so that a repeated run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from rl_metrics.arguments import FloatArray, listed, number
from rl_metrics.errors import MetricsError
from rl_metrics.metric.kinds import check_identity
from rl_metrics.metric.metric import Metric, check_metric

__all__ = ["Part", "TensorMetric", "added", "is_scalar", "split_records"]

Part = tuple[str, int, "torch.Tensor | float"]
"""A number to add: name of the metric, 0 for its numerator or 1 for its weight, the number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMetric:
    """One contribution to a sum or a mean whose numbers may lie on a device.

    `TensorMetric(name="grad_norm", kind="mean", numerator=norm, weight=1.0)`. Stands beside
    `rl_metrics.Metric` in `rl_metrics.torch.all_reduce_metrics`; several of one name add up.
    """

    name: str
    """Name in the log, as in `rl_metrics.Metric`."""

    kind: Literal["sum", "mean"]
    """How records merge: other kinds are not plain sums of numbers."""

    numerator: torch.Tensor | float
    """The sum, or the weighted sum of a mean: a 0-dim tensor on any device, or a number."""

    weight: torch.Tensor | float = 1.0
    """Contributions to a sum, or what the numerator of a mean is divided by; not negative.

    0 says that there is no data, and the numerator must then be 0. What lies on a device is looked
    at after the collective.
    """

    unit: str = ""
    """As in `rl_metrics.Metric`."""

    def __post_init__(self) -> None:
        """Refuse what is no number of a sum or a mean; keep host numbers as floats."""
        check_identity(self.name, "sum", self.unit)
        if self.kind not in ("sum", "mean"):
            raise MetricsError(
                f"metric {self.name!r}: kind is {self.kind!r}; numbers on a device are reduced as"
                " 'sum' or 'mean', so make a Metric of the others"
            )
        for field in ("numerator", "weight"):
            value = getattr(self, field)
            if is_scalar(value):
                object.__setattr__(self, field, value.detach())
            else:
                what = f"metric {self.name!r}: {field}"
                object.__setattr__(self, field, number(value, what))
        numerator, weight = self.numerator, self.weight
        if not isinstance(numerator, torch.Tensor) and not isinstance(weight, torch.Tensor):
            # Its own checks, for numbers that can be looked at.
            Metric(name=self.name, kind=self.kind, numerator=numerator, weight=weight)

    @property
    def empty(self) -> Metric:
        """The record of the host in whose place its numbers are added."""
        return Metric.empty(self.name, self.kind, unit=self.unit)


def is_scalar(value: object) -> bool:
    """Say whether a value is one real number in a tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()


def split_records(records: Any, what: str) -> tuple[list[Metric], list[Part]]:
    """Part records into those of the host and the numbers to add to them.

    Args:
        records: `Metric` and `TensorMetric`, or a mapping from names to such.
        what: subject of the error where it is neither.

    Returns:
        Records of the host, an empty one for each `TensorMetric`, and its two numbers.

    Raises:
        MetricsError: for anything else, naming the key where there is one.
    """
    named = (
        [
            (str(name), replace(record, name=name) if _is_record(record) else record)
            for name, record in records.items()
        ]
        if isinstance(records, Mapping)
        else [("a metric", record) for record in listed(records, what)]
    )
    metrics: list[Metric] = []
    parts: list[Part] = []
    for name, record in named:
        if isinstance(record, TensorMetric):
            metrics.append(record.empty)
            parts += [(record.name, 0, record.numerator), (record.name, 1, record.weight)]
        else:
            metrics.append(check_metric(record, name))
    return metrics, parts


def _is_record(record: object) -> bool:
    return isinstance(record, Metric | TensorMetric)


def added(
    values: FloatArray, parts: Sequence[tuple[int, torch.Tensor | float]], device: torch.device
) -> torch.Tensor:
    """Return a vector with numbers added to some of its places, without reading any of them.

    Args:
        values: float64 [n], on the host.
        parts: place in the vector and number, several to a place or none.
        device: where the vector is wanted. Numbers on that device stay there.

    Returns:
        float64 [n] on `device`.
    """
    values = values.copy()
    waiting: dict[int, list[torch.Tensor]] = {}
    for place, value in parts:
        if isinstance(value, torch.Tensor):
            waiting.setdefault(place, []).append(value)
        else:
            values[place] += value
    # Not waiting for the copy: it is ordered before what follows on the device.
    vector = torch.from_numpy(values).to(device, non_blocking=True)
    if not waiting:
        return vector
    depth = max(map(len, waiting.values()))
    # One row per place, in the order of the numbers: index_add has none on a GPU.
    rows = [(row, k) for row, numbers in enumerate(waiting.values()) for k in range(len(numbers))]
    table = torch.zeros(len(waiting) * depth, dtype=torch.float64, device=device)
    spots = np.array([row * depth + k for row, k in rows], np.int64)
    flat = _stacked([x for numbers in waiting.values() for x in numbers], device)
    table[torch.from_numpy(spots).to(device, non_blocking=True)] = flat
    places = torch.from_numpy(np.array(list(waiting), np.int64)).to(device, non_blocking=True)
    sums = table.reshape(len(waiting), depth).sum(dim=1)
    return vector.index_add(0, places, sums)


def _stacked(numbers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return 0-dim tensors as float64 [n] on a device, those of one kind with one operation."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(numbers):
        kinds.setdefault((value.device, value.dtype), []).append(i)
    # A copy to the host that is not waited for would be read before it arrives.
    stacks = [
        torch.stack([numbers[i] for i in places])
        .to(torch.float64)
        .to(device, non_blocking=device.type != "cpu")
        for places in kinds.values()
    ]
    if len(stacks) == 1:
        return stacks[0]
    order = np.argsort(np.concatenate([np.array(places) for places in kinds.values()]))
    return torch.cat(stacks)[torch.from_numpy(order).to(device, non_blocking=True)]
