"""Weights between Hugging Face, Megatron-Core and engines."""
