"""The calls that we make of SGLang inside its own process, as types.

The type checker does not follow SGLang's sources, so each of its names would be `Any`; a call that
goes through one of these is checked.

Invariants: parameter names are those of the installed SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Hooks", "KillProcessTree", "PortArgs"]


class Hooks(Protocol):
    """SGLang's `HookRegistry`."""

    def register(self, target: str, hook: Callable[..., object], hook_type: object) -> None:
        """Have `hook` called around the function that `target` names, once hooks are applied."""

    def apply_hooks(self) -> None:
        """Put every registered hook in its place."""


class PortArgs(Protocol):
    """The addresses of one server's processes."""

    instance_id: str
    """Id of the server; names its load file."""


class KillProcessTree(Protocol):
    """`kill_process_tree`."""

    def __call__(self, parent_pid: int, include_parent: bool) -> None:
        """Kill a process's descendants, and itself if asked."""
