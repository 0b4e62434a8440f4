"""Everything that touches Megatron-Core's model and process groups."""
