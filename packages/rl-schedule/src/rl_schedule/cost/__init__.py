"""What a sample costs: models by length, their exact integers, and their words in a document."""

from rl_schedule.cost.description import describe_cost, name_of, read_cost
from rl_schedule.cost.models import (
    CostModel,
    QuadraticCost,
    TokenCost,
    evaluate_cost,
    integer_costs,
    mean_cost,
)
from rl_schedule.cost.transformer import TransformerCost

__all__ = [
    "CostModel",
    "QuadraticCost",
    "TokenCost",
    "TransformerCost",
    "describe_cost",
    "evaluate_cost",
    "integer_costs",
    "mean_cost",
    "name_of",
    "read_cost",
]
