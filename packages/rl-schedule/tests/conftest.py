"""Hypothesis settings of this package: no deadline, because a shared machine stalls for longer than any honest one."""

from hypothesis import settings

settings.register_profile("rl-schedule", deadline=None, max_examples=100)
settings.load_profile("rl-schedule")
