"""Hooks: registered ones are recorded and applied to nothing."""

from collections.abc import Callable
from enum import Enum
from typing import Any


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


REGISTERED: dict[str, tuple[Callable[..., Any], HookType]] = {}


class HookRegistry:
    applied = 0

    @classmethod
    def register(
        cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER
    ) -> None:
        REGISTERED[target] = (hook, hook_type)

    @classmethod
    def apply_hooks(cls) -> None:
        cls.applied += 1
