"""The names others build on; a change here is a change of the contract with them."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "rl_dump": [
        "REPLAY_KEY",
        "RESPONSE_FIELDS",
        "ROLLOUT_DUMP",
        "TRAIN_DUMP",
        "Alarm",
        "BackgroundWriter",
        "BatchSummary",
        "Difference",
        "Dump",
        "DumpError",
        "DumpWriter",
        "FieldSummary",
        "Join",
        "Missing",
        "Pair",
        "Problem",
        "RaggedArray",
        "RaggedError",
        "Thresholds",
        "UnsupportedContractError",
        "WriteError",
        "check_templates",
        "compare",
        "convert",
        "doctor",
        "export_micro_batch",
        "join",
        "open_dump",
        "resolve_template",
        "summary",
        "trend",
        "write_dump",
        "write_html",
    ],
    "rl_dump.torch": [
        "DumpTopology",
        "GatherTensor",
        "LogProbCapture",
        "restore_context_parallel_fields_to_cpu",
        "save_debug_train_data",
        "write_torch_archive",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    if module == "rl_dump.torch":
        pytest.importorskip("torch")
    found = importlib.import_module(module)
    assert found.__all__ == PUBLIC[module]
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    if module == "rl_dump.torch":
        pytest.importorskip("torch")
    found = importlib.import_module(module)
    constants = {"REPLAY_KEY", "RESPONSE_FIELDS", "ROLLOUT_DUMP", "TRAIN_DUMP"}
    for name in set(found.__all__) - constants:
        assert getattr(found, name).__doc__, name
        for method, value in (
            vars(getattr(found, name)).items() if isinstance(getattr(found, name), type) else ()
        ):
            if not method.startswith("_") and callable(value):
                assert value.__doc__, f"{name}.{method}"
