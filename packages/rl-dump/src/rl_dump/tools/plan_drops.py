"""Why a schedule plan dropped a sample, as far as the plan itself says.

A small view of `schedule-plan.v1`: the dropped and the oversized samples, and three settings. Every
other key is ignored; nothing of the package that owns the contract is imported.

Invariants, each matched by a test in `tests/golden/test_neighbours.py`: every dropped sample gets a
reason; another contract id is refused, naming both ids; a newer minor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl_dump.contract_header import check_header
from rl_dump.errors import DumpError

__all__ = ["SCHEDULE_PLAN", "plan_drops"]

SCHEDULE_PLAN: Final = "schedule-plan.v1"
"""The only contract of another package that this one reads."""

_DROPPED = "dropped by the schedule"


def plan_drops(
    document: Mapping[str, Any], rollouts: Mapping[int, int], *, where: str
) -> dict[int, str]:
    """Return the reason for every sample that a plan drops, by rollout position.

    Args:
        document: the plan, `schedule-plan.v1`.
        rollouts: rollout id by rollout position, of the samples for which it is known: a rollout
            is dropped whole, so one sample that is too long takes its siblings with it.
        where: what to name in errors.

    Returns:
        In the plan's order, such as `{10: "dropped by the schedule: its rollout does not fill a
        step of 8 rollouts"}`.

    Raises:
        UnsupportedContractError: another contract.
        DumpError: a key is missing or not numeric.
    """
    check_header(document, {SCHEDULE_PLAN: 1}, where=where)
    try:
        arrays, settings = document["arrays"], document.get("settings") or {}
        dropped = [int(position) for position in arrays["dropped_samples"]["data"]]
        oversized = {
            int(position) for position in arrays.get("oversized_samples", {}).get("data", ())
        }
        cap = int(settings.get("max_tokens_per_gpu") or 0) * int(settings.get("cp_size") or 1)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(
            f"{where}: {SCHEDULE_PLAN}: cannot read what it drops ({error!r}); write the plan"
            " again with rl-schedule"
        ) from error
    if settings.get("on_oversized") != "drop":
        oversized = set()
    too_long = {rollouts[position] for position in oversized if position in rollouts}
    size, limit = settings.get("global_batch_size"), f"the {cap} tokens that a micro-batch may hold"
    # What is not too long was dropped because the last rollouts fill no step: the only other way.
    step = f"a step of {size} rollouts" if isinstance(size, int) else "a step"
    trailing = f"{_DROPPED}: its rollout does not fill {step}" if settings else _DROPPED
    reasons = dict.fromkeys(dropped, trailing)
    for position in dropped:
        if position in oversized:
            reasons[position] = f"{_DROPPED}: longer than {limit}"
        elif rollouts.get(position) in too_long:
            reasons[position] = f"{_DROPPED}: a sample of its rollout is longer than {limit}"
    return reasons
