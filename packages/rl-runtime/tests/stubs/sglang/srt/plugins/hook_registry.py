"""Hooks: registered ones are recorded and applied to nothing."""

from enum import Enum

REGISTERED = {}


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    applied = 0

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER):
        REGISTERED[target] = (hook, hook_type)

    @classmethod
    def apply_hooks(cls):
        cls.applied += 1
