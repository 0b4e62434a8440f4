"""What a process shares with its machine: logs, ports, signals and other processes."""
