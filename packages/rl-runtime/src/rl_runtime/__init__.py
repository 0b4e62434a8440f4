"""The training system."""
