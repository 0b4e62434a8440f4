"""Typed recipes: a module for each subsystem that a recipe sets."""

from __future__ import annotations

from rl_runtime.config.load import load_recipe, recipe_to_toml
from rl_runtime.config.paths import absolute_paths
from rl_runtime.config.recipe import Recipe

__all__ = ["Recipe", "absolute_paths", "load_recipe", "recipe_to_toml"]
