"""The self-test, `python -m rl_metrics.selftest`: one random step on every layout."""
