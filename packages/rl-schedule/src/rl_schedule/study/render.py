"""A plan as one self-contained HTML page.

It shows a lane per rank and a bar per micro-batch, as wide as its cost and coloured by its tokens,
with slots aligned.

Invariants: the page loads nothing from anywhere; text from the caller is data, never markup; at
most `MOST_LANES` lanes are drawn, and the page says so when there are more ranks.
"""

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from rl_schedule.arrays import IntArray
from rl_schedule.plan import SchedulePlan
from rl_schedule.request import ScheduleRequest
from rl_schedule.study.simulation import StepTiming

__all__ = ["MOST_LANES", "render_html"]

MOST_LANES = 96
"""Lanes drawn at most: more are neither readable nor quick."""


def render_html(
    plan: SchedulePlan,
    request: ScheduleRequest,
    timings: Sequence[StepTiming],
    *,
    title: str,
    seconds: bool,
) -> str:
    """Return the page.

    Args:
        plan: what to show.
        request: what it was made for.
        timings: one per step, as `simulate_plan` gives them.
        title: heading, for example the name of the lengths' file.
        seconds: whether the timings are seconds; otherwise they are relative.
    """
    lengths = request.padded_lengths
    costs = request.costs_of(np.arange(lengths.size)).astype(np.float64)
    data = {
        "title": title,
        "about": (
            f"{plan.sample_positions.size:,} samples on {plan.dp_size:,} data-parallel ranks"
            + (
                f", up to {request.token_cap:,} tokens per micro-batch"
                if request.token_cap
                else f", {request.micro_batch_size} samples per micro-batch"
            )
            + f"; balance {plan.settings['balance']}; dropped {len(plan.dropped_samples):,}; digest"
            f" {plan.digest[:12]}"
        ),
        "ranks": plan.dp_size,
        "cap": request.token_cap,
        "seconds": seconds,
        "steps": [
            _step(plan, number, timing, lengths, costs) for number, timing in enumerate(timings)
        ],
    }
    page = (
        resources.files(__package__).joinpath("templates", "plan.html").read_text(encoding="utf-8")
    )
    # "<" is escaped, so that no text in the data can end the script element.
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("__TITLE__", html.escape(title)).replace("__DATA__", script)


def _step(
    plan: SchedulePlan,
    number: int,
    timing: StepTiming,
    lengths: IntArray,
    costs: np.ndarray[Any, Any],
) -> dict[str, Any]:
    stats = plan.stats.steps[number]
    start = sum(plan.num_microbatches[:number])
    slots = range(start, start + stats.micro_batches)
    sums = np.array(
        [
            [costs[plan.micro_batch_samples(rank, slot)].sum() for slot in slots]
            for rank in range(plan.dp_size)
        ]
    )
    oversized = np.asarray(plan.oversized_samples, dtype=np.int64)
    lanes = [
        {
            "rank": rank,
            "cost": float(sums[rank].sum()),
            "batches": [
                _batch(
                    plan.micro_batch_samples(rank, slot),
                    float(sums[rank, place]),
                    lengths,
                    oversized,
                )
                for place, slot in enumerate(slots)
            ],
        }
        for rank in _chosen_ranks(sums.sum(axis=1))
    ]
    return {
        "rollouts": stats.num_rollouts,
        "samples": stats.num_samples,
        "tokens": stats.num_tokens,
        "slots": stats.micro_batches,
        "slotsBound": stats.micro_batch_bound,
        "fillers": stats.fillers,
        "fill": stats.fill,
        "rank": stats.rank_imbalance,
        "rankBound": stats.rank_bound,
        "slot": stats.slot_imbalance,
        "slotBound": stats.slot_bound,
        "path": stats.path,
        "time": timing.seconds,
        "useful": timing.useful_share,
        "bubble": timing.bubble_share,
        "imbalance": timing.imbalance_share,
        "sync": timing.sync_share,
        "meanCost": float(sums.sum()) / plan.dp_size or 1.0,
        "slotCosts": sums.max(axis=0).tolist(),
        "lanes": lanes,
    }


def _batch(samples: IntArray, cost: float, lengths: IntArray, oversized: IntArray) -> list[float]:
    """Return samples, tokens, cost, longest sample, whether it is oversized."""
    return [
        int(samples.size),
        int(lengths[samples].sum()),
        cost,
        int(lengths[samples].max(initial=0)),
        int(np.isin(samples, oversized).any()),
    ]


def _chosen_ranks(loads: np.ndarray[Any, Any]) -> list[int]:
    """Return the ranks to draw, ascending: all, or an even choice by cost with both extremes."""
    if loads.size <= MOST_LANES:
        return list(range(loads.size))
    by_cost = np.argsort(-loads, kind="stable")
    places = np.unique(np.rint(np.linspace(0, loads.size - 1, MOST_LANES)).astype(np.int64))
    chosen: list[int] = np.sort(by_cost[places]).tolist()
    return chosen
