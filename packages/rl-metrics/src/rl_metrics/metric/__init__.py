"""Metrics as records that say how they merge, and the reports made of them."""
