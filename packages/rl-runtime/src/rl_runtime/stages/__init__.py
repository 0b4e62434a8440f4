"""The stages of a run, and the replay of one micro-batch of it."""
