"""Megatron-Core trainers."""
