"""What a process of a run leaves behind: logs, ports, signals, children."""
