"""How others form micro-batches and give them to ranks, written here from their descriptions.

Each function returns, for every rank, its micro-batches in running order, each as positions of
samples; every rank has as many. They see lengths and costs of one optimizer step. None of them is
the code of the system it is named after: grouping of rollouts and steps is left out.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_schedule import ScheduleRequest, first_fit_decreasing, karmarkar_karp, plan_schedule
from rl_schedule.packing import round_up, split_bins

Array: TypeAlias = npt.NDArray[np.int64]
Layout: TypeAlias = list[list[list[int]]]
Order: TypeAlias = Callable[[Array, Array, int, int], Layout]


def ours(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """Plan with the default settings and the costs given."""
    plan = plan_schedule(
        ScheduleRequest(
            total_lengths=lengths,
            rollout_ids=np.arange(lengths.size),
            sample_costs=costs,
            global_batch_size=None,
            splitter="all",
            dp_size=ranks,
            max_tokens_per_gpu=cap,
        )
    )
    return [
        [
            plan.micro_batch_samples(rank, number).tolist()
            for number in range(plan.micro_batches_per_rank)
        ]
        for rank in range(ranks)
    ]


def first_fit_decreasing_in_turn(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """First-fit-decreasing; the fullest bins are split up to a multiple of the ranks; dealt."""
    del costs
    bins = aligned(first_fit_decreasing(lengths, cap), lengths, ranks)
    return [bins[rank::ranks] for rank in range(ranks)]


def naive_karmarkar_karp(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """As many sets as the tokens need, level in tokens by differencing, dealt; unchecked."""
    del costs
    sets = karmarkar_karp(lengths, fewest(lengths, cap, ranks))
    return [sets[rank::ranks] for rank in range(ranks)]


def miles(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """First-fit-decreasing, split; ranks get equally many by differencing of tokens."""
    del costs
    bins = aligned(first_fit_decreasing(lengths, cap), lengths, ranks)
    return dealt(bins, lengths, ranks)


def miles_by_flops(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """As many sets as the tokens need, level in FLOPs by differencing, and so dealt; unchecked."""
    return dealt(karmarkar_karp(costs, fewest(lengths, cap, ranks)), costs, ranks)


def verl(lengths: Array, costs: Array, cap: int, ranks: int) -> Layout:
    """Samples spread over ranks first, equally many, level in FLOPs; then sets inside each rank.

    The rank with most tokens says how many; small ones run at both ends. No set is checked.
    """
    shares = karmarkar_karp(costs, ranks, equal_size=lengths.size % ranks == 0)
    count = max(-(-int(lengths[share].sum()) // cap) for share in shares)
    layout = []
    for share in shares:
        sets = karmarkar_karp(costs[share], count)
        chosen = sorted(([share[i] for i in one] for one in sets), key=lambda one: costs[one].sum())
        layout.append(chosen[::2] + chosen[1::2][::-1])
    return layout


ORDERS: dict[str, Order] = {
    "rl-schedule": ours,
    "FFD, dealt in turn": first_fit_decreasing_in_turn,
    "naive Karmarkar-Karp": naive_karmarkar_karp,
    "miles: FFD + KK by tokens": miles,
    "miles: KK by FLOPs": miles_by_flops,
    "verl: KK over ranks, then KK": verl,
}


def aligned(bins: list[list[int]], lengths: Array, ranks: int) -> list[list[int]]:
    return split_bins(bins, lengths.tolist(), round_up(len(bins), ranks))


def fewest(lengths: Array, cap: int, ranks: int) -> int:
    return round_up(-(-int(lengths.sum()) // cap), ranks)


def dealt(bins: list[list[int]], weights: Array, ranks: int) -> Layout:
    """Deal equally many bins to each rank by differencing; a rank runs them in opening order."""
    sums = [int(weights[one].sum()) for one in bins]
    return [[bins[i] for i in hand] for hand in karmarkar_karp(sums, ranks, equal_size=True)]
