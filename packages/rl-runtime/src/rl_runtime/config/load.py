"""Read a recipe from TOML with overrides, and write the resolved one.

Invariants: every problem of a recipe is reported at once; an unknown key names the nearest known
one; values are checked before anything starts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib
from pydantic import BaseModel, ValidationError

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError

__all__ = ["load_recipe", "recipe_to_toml"]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        path: TOML file.
        overrides: strings "section.key=value"; the value is TOML; what is not TOML is a string.

    Returns:
        The checked recipe.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, or a value is wrong. One
            line per problem.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"recipe {path}: {error.strerror or error}: give the path of a TOML recipe, such as"
            " recipes/quickstart.toml"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(table, override)
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(
                f"{_origin(problem, path, overrides)}: {_describe(problem)}"
                for problem in error.errors()
            )
        ) from error


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    sections = key.strip().split(".")
    if not separator or len(sections) < 2 or not all(sections):
        raise ConfigError(
            f"override {override!r}: expected section.key=value, such as optimizer.lr=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for section in sections[:-1]:
        inner: object = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {section} is a value, not a table")
        table = inner
    table[sections[-1]] = value


def _origin(problem: Mapping[str, Any], path: str | Path, overrides: Sequence[str]) -> str:
    """Name the override that a wrong value came from, else the file."""
    key = ".".join(map(str, problem["loc"]))
    given = [
        override
        for override in overrides
        if f"{key}.".startswith(f"{override.partition('=')[0].strip()}.")
    ]
    return f"--set {given[-1]}" if given else f"recipe {path}"


def _describe(problem: Mapping[str, Any]) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _known_keys(Recipe), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {key}{hint}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{key}: {message} (given: {problem['input']!r})" if key else message


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def recipe_to_toml(recipe: Recipe) -> str:
    """Write a recipe as TOML that `load_recipe` reads back to an equal one."""
    lines: list[str] = []
    for section, values in recipe.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [
            f"{json.dumps(key)} = {_toml_value(value)}"
            for key, value in values.items()
            if value is not None
        ]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{json.dumps(str(key))} = {_toml_value(item)}" for key, item in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
