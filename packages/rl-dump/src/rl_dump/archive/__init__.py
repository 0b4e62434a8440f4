"""Read torch archives (`.pt`) with numpy alone.

Layer: algorithms. Nothing here imports torch; a pickle is interpreted by our own machine, which can build plain values only.
"""
