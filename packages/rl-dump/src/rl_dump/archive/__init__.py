"""Read torch archives (`.pt`) with numpy alone.

Nothing here imports torch; a pickle is interpreted by our own machine, which can build plain values
only.
"""
