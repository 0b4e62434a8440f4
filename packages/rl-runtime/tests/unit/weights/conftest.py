"""Import Megatron-Core once before test modules do: its import warns, which is an error here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rl_runtime.training.trainer  # noqa: F401
