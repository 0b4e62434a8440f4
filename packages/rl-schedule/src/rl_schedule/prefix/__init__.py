"""Plans that charge a prompt once for the rollouts of a group that share a micro-batch.

`PrefixRequest` says which samples start with the same tokens, `plan_with_prefixes` decides, and
`check_prefix_plan` proves the outcome. `fragments` cuts groups to what fits, `forest` levels ranks
by moving responses and trees, `filling` and `slots` see to micro-batches, `step` chooses.
"""

from rl_schedule.prefix.check import check_prefix_plan
from rl_schedule.prefix.cost import PrefixCost
from rl_schedule.prefix.plan import PrefixMicroBatch, PrefixPlan
from rl_schedule.prefix.planner import plan_with_prefixes
from rl_schedule.prefix.request import PrefixRequest
from rl_schedule.prefix.statistics import PrefixStepStats

__all__ = [
    "PrefixCost",
    "PrefixMicroBatch",
    "PrefixPlan",
    "PrefixRequest",
    "PrefixStepStats",
    "check_prefix_plan",
    "plan_with_prefixes",
]
