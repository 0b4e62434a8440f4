"""Processes: ending them is recorded."""

ENDED = []


def kill_process_tree(parent_pid, include_parent=True) -> None:
    ENDED.append((parent_pid, include_parent))
