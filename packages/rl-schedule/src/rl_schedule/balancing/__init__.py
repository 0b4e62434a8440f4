"""Balanced dynamic packing: who takes which sample, under the cap, level over ranks and slots.

`portfolio` chooses among the methods: `greedy` passes over `two_level` LPT, `pack_long_first` with
`swap_between_bins` for tight fits, then `swap_between_ranks` and `exact` as repairs. All of them
see one step as a `StepProblem`; `bounds` say when nothing better exists.
"""

from rl_schedule.balancing.portfolio import balance_step
from rl_schedule.balancing.problem import Assignment

__all__ = ["Assignment", "balance_step"]
