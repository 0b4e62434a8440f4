"""Plugins: loading them is recorded."""

LOADED: list[bool] = []


def load_plugins() -> None:
    LOADED.append(True)
