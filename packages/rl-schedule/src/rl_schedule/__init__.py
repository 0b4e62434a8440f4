"""Which samples run where and when: packing and balancing for data-parallel training.

Pure functions on numpy. `build_dp_schedule` decides optimizer steps, micro-batches and ranks of one
rollout batch; `check_plan` proves a plan's promises; `schedule-plan.v1` carries it between
processes.
"""

from rl_schedule.cost import CostModel, QuadraticCost, TokenCost, TransformerCost
from rl_schedule.errors import (
    InfeasibleScheduleError,
    PlanDocumentError,
    ScheduleError,
    UnsupportedContractError,
)
from rl_schedule.invariants import Problem, check_plan
from rl_schedule.packing import (
    best_fit_decreasing,
    first_fit,
    first_fit_decreasing,
    karmarkar_karp,
)
from rl_schedule.plan import RankView, SamplePlacement, SchedulePlan
from rl_schedule.prefix import (
    PrefixCost,
    PrefixMicroBatch,
    PrefixPlan,
    PrefixRequest,
    PrefixStepStats,
    check_prefix_plan,
    plan_with_prefixes,
)
from rl_schedule.request import ScheduleRequest
from rl_schedule.schedule import build_dp_schedule, plan_schedule
from rl_schedule.statistics import ScheduleStats, StepStats
from rl_schedule.steps import StepSplitter, compute_dynamic_global_batch_size
from rl_schedule.trainer_side import Filler, build_filler, restore_order

__all__ = [
    "CostModel",
    "Filler",
    "InfeasibleScheduleError",
    "PlanDocumentError",
    "PrefixCost",
    "PrefixMicroBatch",
    "PrefixPlan",
    "PrefixRequest",
    "PrefixStepStats",
    "Problem",
    "QuadraticCost",
    "RankView",
    "SamplePlacement",
    "ScheduleError",
    "SchedulePlan",
    "ScheduleRequest",
    "ScheduleStats",
    "StepSplitter",
    "StepStats",
    "TokenCost",
    "TransformerCost",
    "UnsupportedContractError",
    "best_fit_decreasing",
    "build_dp_schedule",
    "build_filler",
    "check_plan",
    "check_prefix_plan",
    "compute_dynamic_global_batch_size",
    "first_fit",
    "first_fit_decreasing",
    "karmarkar_karp",
    "plan_schedule",
    "plan_with_prefixes",
    "restore_order",
]
