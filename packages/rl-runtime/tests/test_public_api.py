"""The names that recipes, hooks and other packages build on: a change belongs in the changelog."""

import importlib

import pytest

PUBLIC = {
    "rl_runtime.config": ["Recipe", "absolute_paths", "load_recipe", "recipe_to_toml"],
    "rl_runtime.contract_table": [
        "READS_GROUP",
        "WRITES_GROUP",
        "ContractTable",
        "differences",
        "gaps",
        "installed_contracts",
        "refuse_mixed_cluster",
    ],
    "rl_runtime.records": ["Prompt", "PromptGroup", "Rollout", "Sample"],
    "rl_runtime.rollout.hooks": [
        "Engine",
        "GenerateContext",
        "GenerateHook",
        "RewardHook",
        "load_hook",
    ],
    "rl_runtime.setup.doctor": ["Finding", "Report", "diagnose", "report_document"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__all__ == PUBLIC[module]
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_and_class_is_documented(module: str) -> None:
    found = importlib.import_module(module)
    for name in found.__all__:
        if callable(getattr(found, name)):
            assert getattr(found, name).__doc__, name


def test_the_commands_are_these() -> None:
    cli = importlib.import_module("rl_runtime.cli.app")
    assert sorted(command.callback.__name__ for command in cli.app.registered_commands) == [
        "doctor",
        "replay",
        "report",
        "train",
    ]
