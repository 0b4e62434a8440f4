"""Processes: ending them is recorded."""

ENDED: list[tuple[int | None, bool]] = []


def kill_process_tree(parent_pid: int | None, include_parent: bool = True) -> None:
    ENDED.append((parent_pid, include_parent))
