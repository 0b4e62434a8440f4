"""Which samples share a micro-batch when only the token cap matters: bins, packers, dealing."""

from rl_schedule.packing.bins import (
    align_bins,
    bin_sums,
    group_bins,
    number_bins,
    round_up,
    split_bins,
)
from rl_schedule.packing.karmarkar_karp import deal_by_differencing, karmarkar_karp
from rl_schedule.packing.level_hands import level_hands
from rl_schedule.packing.limited import Limits, fill_limited, split_limited
from rl_schedule.packing.packers import (
    best_fit_decreasing,
    decreasing_order,
    fill_best_fit,
    fill_first_fit,
    first_fit,
    first_fit_decreasing,
)
from rl_schedule.packing.units import Units

__all__ = [
    "Limits",
    "Units",
    "align_bins",
    "best_fit_decreasing",
    "bin_sums",
    "deal_by_differencing",
    "decreasing_order",
    "fill_best_fit",
    "fill_first_fit",
    "fill_limited",
    "first_fit",
    "first_fit_decreasing",
    "group_bins",
    "karmarkar_karp",
    "level_hands",
    "number_bins",
    "round_up",
    "split_bins",
    "split_limited",
]
