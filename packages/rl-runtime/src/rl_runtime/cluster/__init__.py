"""Placement and health of actors."""
