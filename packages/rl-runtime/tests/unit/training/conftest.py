"""Import Megatron-Core once, before test modules do: it warns at import, and warnings are errors here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import rl_runtime.training.trainer  # noqa: F401
