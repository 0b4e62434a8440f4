"""Cost models in words that survive JSON; layer above the cost models.

Invariant: `read_cost(describe_cost(model)) == model` for every model of this package.
"""

from typing import Any

from rl_schedule.contract import CostDocument
from rl_schedule.cost import CostModel, QuadraticCost, TokenCost
from rl_schedule.errors import PlanDocumentError, ScheduleError
from rl_schedule.transformer_cost import TransformerCost

__all__ = ["describe_cost", "read_cost"]


def describe_cost(model: CostModel) -> CostDocument:
    """Say which model this is; one from elsewhere is `custom` with its name."""
    if isinstance(model, TokenCost):
        return {"kind": "tokens", "parameters": {}}
    if isinstance(model, QuadraticCost):
        return {
            "kind": "quadratic",
            "parameters": {"linear": model.linear, "quadratic": model.quadratic},
        }
    if isinstance(model, TransformerCost):
        windows = [list(entry) for entry in model.window_pair_flops]
        parameters = {
            "token_flops": model.token_flops,
            "pair_flops": model.pair_flops,
            "window_pair_flops": windows,
        }
        return {"kind": "transformer", "parameters": parameters}
    module = getattr(model, "__module__", type(model).__module__)
    name = getattr(model, "__qualname__", None) or getattr(
        model, "__name__", type(model).__qualname__
    )
    return {"kind": "custom", "parameters": {"name": f"{module}:{name}"}}


def read_cost(document: CostDocument) -> CostModel | None:
    """Rebuild the model; None for one from elsewhere.

    Raises:
        PlanDocumentError: an unknown kind, or parameters that its model does not take.
    """
    found: object = document
    if not isinstance(found, dict) or not {"kind", "parameters"} <= found.keys():
        raise PlanDocumentError(
            [f"settings.cost: expected an object with kind and parameters, got {found!r}"]
        )
    kind, parameters = document["kind"], document["parameters"]
    try:
        if kind == "tokens":
            return TokenCost()
        if kind == "quadratic":
            return QuadraticCost(**parameters)
        if kind == "transformer":
            return TransformerCost(
                **{**parameters, "window_pair_flops": _pairs(parameters["window_pair_flops"])}
            )
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise PlanDocumentError(
            [f"settings.cost of kind {kind!r} has unusable parameters {parameters!r}: {error}"]
        ) from error
    if kind == "custom":
        return None
    raise PlanDocumentError([f"settings.cost has unknown kind {kind!r}"])


def _pairs(windows: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(window), int(flops)) for window, flops in windows)
