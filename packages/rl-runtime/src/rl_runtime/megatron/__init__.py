"""The model on Megatron-Core: shape, layers, optimizer, and the mesh that it is spread over."""
