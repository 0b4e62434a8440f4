"""Plugins: loading them is recorded."""

LOADED = []


def load_plugins() -> None:
    LOADED.append(True)
