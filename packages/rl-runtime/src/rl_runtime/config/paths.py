"""Paths of a recipe as every process of a run sees them.

A user writes them relative to where the command is started; actors on an existing cluster work
somewhere else.

Invariants: after `absolute_paths` no path of a recipe depends on a working folder.
"""

from __future__ import annotations

from pathlib import Path

from rl_runtime.config.recipe import Recipe

__all__ = ["absolute_paths"]

_PATHS = {
    "run": ("dir",),
    "model": ("path", "reference_path"),
    "data": ("path",),
    "dump": ("rollout", "train"),
    "debug": ("load_rollout_dump",),
}


def absolute_paths(recipe: Recipe) -> Recipe:
    """Make all paths absolute, from the current working folder, with `~` expanded.

    Empty ones and those in `{run_dir}` stay.
    """
    sections = {}
    for name, keys in _PATHS.items():
        section = getattr(recipe, name)
        sections[name] = section.model_copy(
            update={key: _absolute(getattr(section, key)) for key in keys}
        )
    return recipe.model_copy(update=sections)


def _absolute(path: str | Path) -> str | Path:
    text = str(path)
    if not text or text.startswith("{run_dir}"):
        return path
    absolute = Path.cwd() / Path(text).expanduser()
    return absolute if isinstance(path, Path) else str(absolute)
