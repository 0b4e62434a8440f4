"""Does a mesh fit a model?

Invariants: all problems are reported at once, each by the recipe's key and the model's own number.
"""

from __future__ import annotations

from rl_runtime.config.recipe import Recipe
from rl_runtime.megatron.shape import ModelShape

__all__ = ["mesh_problems"]


def mesh_problems(shape: ModelShape, recipe: Recipe) -> list[str]:
    """List the axes of `[parallel]` that do not divide the model.

    Example:
        6 heads in 2 groups under `parallel.tensor = 4` give "parallel.tensor = 4 does not divide
        num_attention_heads = 6" and one more line for num_key_value_heads.
    """
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    divided = {
        "num_attention_heads": (shape.num_heads, "tensor", tensor),
        "num_key_value_heads": (shape.num_key_value_heads, "tensor", tensor),
        "intermediate_size": (shape.intermediate_size, "tensor", tensor),
        "num_hidden_layers": (shape.num_layers, "pipeline", pipeline),
    }
    problems = [
        f"parallel.{axis} = {size} does not divide {name} = {value}"
        for name, (value, axis, size) in divided.items()
        if value % size
    ]
    if recipe.megatron.get("sequence_parallel") and tensor == 1:
        problems.append("megatron.sequence_parallel needs parallel.tensor > 1")
    return problems
