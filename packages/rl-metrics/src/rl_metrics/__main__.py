"""`python -m rl_metrics`: the command line."""

from rl_metrics.cli import main

if __name__ == "__main__":
    main()
