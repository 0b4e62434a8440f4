"""`python -m rl_schedule` is `rl-schedule`."""

from rl_schedule.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
