"""Whether what stands inside a header's lists and mappings is what their readers take for
granted.

A checksum tells damage, not sense: a header that another program wrote can be sealed well and still
hold a word for a number.

Invariant, matched by a test in `tests/unit/test_header.py`: a header that passes makes no reader of
this package fail on a type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["content_problem"]


def content_problem(header: Mapping[str, Any]) -> str | None:
    """Return the first key whose content has a wrong type, with the place in it:
    `dropped[0].reason`; None if all is well.

    Args:
        header: keys of the right outer type; those that are missing are not looked at.
    """
    minor = header.get("minor", 0)
    if not _whole(minor) or minor < 0:
        return "minor"
    for name, document in header.get("fields", {}).items():
        if not isinstance(name, str) or not isinstance(document, dict):
            return f"fields[{name!r}]"
    for key, rules in (("dp_shards", _SHARD), ("dropped", _DROPPED)):
        for row, entry in enumerate(header.get(key) or []):
            if not isinstance(entry, dict):
                return f"{key}[{row}]"
            wrong = next(
                (name for name, holds in rules.items() if not holds(entry.get(name))), None
            )
            if wrong is not None:
                return f"{key}[{row}].{wrong}"
    rewards = header.get("raw_reward") or []
    wrong_reward = next((row for row, reward in enumerate(rewards) if not _number(reward)), None)
    return None if wrong_reward is None else f"raw_reward[{wrong_reward}]"


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole_or_none(value: object) -> bool:
    return value is None or _whole(value)


def _number(value: object) -> bool:
    # A whole number beyond the largest float would fail in whoever computes with it.
    return isinstance(value, (float, np.floating)) or (
        isinstance(value, (int, np.integer)) and abs(int(value)) <= sys.float_info.max
    )


def _numbers(value: object) -> bool:
    """Take None, a flat array of whole numbers, or a list or tuple of them; None stands for what is not known."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return value is None or (isinstance(value, (list, tuple)) and all(map(_whole_or_none, value)))


def _partition(value: object) -> bool:
    return _numbers(value) and (value is None or isinstance(value, np.ndarray) or None not in value)  # type: ignore[operator]


_SHARD: dict[str, Callable[[object], bool]] = {
    "rank": _whole_or_none,
    "data_parallel_rank": _whole_or_none,
    "partition": _partition,
    "num_microbatches": _numbers,
    "global_batch_sizes": _numbers,
}
_DROPPED: dict[str, Callable[[object], bool]] = {
    "rollout_position": _whole_or_none,
    "sample_index": _whole_or_none,
    "reason": lambda value: value is None or isinstance(value, str),
}
