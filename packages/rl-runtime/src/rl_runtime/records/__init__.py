"""The records between a prompt and a batch."""

from rl_runtime.records.rollout_types import Prompt, PromptGroup, Rollout, Sample

__all__ = ["Prompt", "PromptGroup", "Rollout", "Sample"]
