"""Balanced dynamic packing: who takes which sample, under the cap, level over ranks and slots;
algorithm layer.

`portfolio` chooses among the methods: `greedy` passes over `two_level` LPT, `composites` with
`levelling` for tight fits, then `exchange` and `exact` as repairs. All of them see one step as a
`StepProblem`.
"""

from rl_schedule.balancing.portfolio import balance_step

__all__ = ["balance_step"]
