"""Where Ray prints what its workers say."""

from typing import Any, TextIO


def print_worker_logs(data: dict[str, Any], print_file: TextIO) -> None:
    del data, print_file
