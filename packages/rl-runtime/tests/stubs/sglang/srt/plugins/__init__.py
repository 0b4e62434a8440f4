"""Plugins: loading them is recorded."""

LOADED = []


def load_plugins():
    LOADED.append(True)
