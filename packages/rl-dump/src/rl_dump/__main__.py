"""Run the command line as `python -m rl_dump`."""

from rl_dump.cli import main

if __name__ == "__main__":
    main()
