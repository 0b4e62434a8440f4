"""Rollouts: data, engines, rewards, groups."""
