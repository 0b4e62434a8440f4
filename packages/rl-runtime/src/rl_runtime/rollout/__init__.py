"""Rollouts: where prompts come from, how they are played, what they score."""
