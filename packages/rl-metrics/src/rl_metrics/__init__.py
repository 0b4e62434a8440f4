"""Exact losses and metrics for any layout."""
