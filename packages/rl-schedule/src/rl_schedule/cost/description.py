"""Cost models in words that survive JSON.

A model of this package is described by its kind and its fields, any other callable by its name
alone, because a document must not name code to import.

Invariant: `read_cost(describe_cost(model)) == model` for every model of this package.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from rl_schedule.contract import CostDocument
from rl_schedule.cost.models import CostModel, QuadraticCost, TokenCost
from rl_schedule.cost.transformer import TransformerCost
from rl_schedule.errors import PlanDocumentError

__all__ = ["describe_cost", "name_of", "read_cost"]

_KINDS: Final[Mapping[str, type[TokenCost | QuadraticCost | TransformerCost]]] = {
    "tokens": TokenCost,
    "quadratic": QuadraticCost,
    "transformer": TransformerCost,
}


def describe_cost(model: CostModel) -> CostDocument:
    """Say which model this is; one from elsewhere is `custom` with its name."""
    for kind, known in _KINDS.items():
        if isinstance(model, known) and is_dataclass(model):
            # JSON knows no tuples: lists, so that a document equals itself after a round trip.
            parameters = {
                name: [list(entry) for entry in value]
                if isinstance(value, tuple)
                else _plain(value)
                for name, value in asdict(model).items()
            }
            return {"kind": kind, "parameters": parameters}
    return {"kind": "custom", "parameters": {"name": name_of(model)}}


def _plain(value: Any) -> Any:
    """Return a numpy number as the Python number that JSON knows."""
    return value.item() if hasattr(value, "item") else value


def name_of(target: object) -> str:
    """Return where a callable comes from, as `module:name`; of an object, its class."""
    kind = type(target)
    module = getattr(target, "__module__", kind.__module__)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", kind.__qualname__)
    return f"{module}:{name}"


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
    if kind == "custom":
        return None
    known = _KINDS.get(str(kind))
    if known is None:
        raise PlanDocumentError([f"settings.cost has unknown kind {kind!r}"])
    try:
        return known(**parameters)
    except (TypeError, ValueError) as error:
        raise PlanDocumentError(
            [f"settings.cost of kind {kind!r} has unusable parameters {parameters!r}: {error}"]
        ) from error
