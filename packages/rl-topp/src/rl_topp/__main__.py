"""`python -m rl_topp` is the command line."""

from rl_topp.cli import main

main()
