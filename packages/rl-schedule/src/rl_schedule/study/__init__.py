"""What the command line shows of a plan: files read, methods compared, time simulated, pictures."""

__all__: list[str] = []
