"""What all actors of a run have in common."""

from __future__ import annotations

from pathlib import Path

from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import ContractTable, installed_contracts
from rl_runtime.process.logs import log_to_file

__all__ = ["Actor"]


class Actor:
    """A process of a run. It is made at once; what is slow to load is left to a method `start`."""

    def __init__(self, recipe: Recipe, *, log_path: Path) -> None:
        """Send everything that the process prints to a file."""
        log_to_file(log_path)
        self._recipe = recipe

    def contracts(self) -> ContractTable:
        """Say which contracts the packages on this node write and read."""
        return installed_contracts()
