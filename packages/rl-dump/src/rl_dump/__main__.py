"""Run the command line as `python -m rl_dump`.

Layer: cli.
"""

from rl_dump.cli import main

if __name__ == "__main__":
    main()
