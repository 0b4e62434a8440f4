"""A hook's import path is checked when it is loaded: each way to be wrong has its own words."""

import sys
import types

import pytest

from rl_runtime.errors import ConfigError
from rl_runtime.rollout.hooks import load_hook
from rl_runtime.rollout.reward import label_reward


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rl_runtime.rollout.reward", "expected module:function"),
        (":label_reward", "expected module:function"),
        ("rl_runtime.rollout.reward:", "expected module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("rl_runtime.rollout.reward:no_such", "no attribute 'no_such'"),
        ("rl_runtime.rollout.reward:_CONCURRENCY", "is a int, not a function"),
    ],
)
def test_a_wrong_path_is_refused_with_the_reason(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^hook '{path}': .*{message}"):
        load_hook(path)


def test_a_module_that_raises_when_it_is_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "broken_hooks":
                raise RuntimeError("no licence")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ConfigError, match="importing broken_hooks raised RuntimeError: no licence"):
        load_hook("broken_hooks:f")


def test_a_function_and_a_callable_object_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_hook("rl_runtime.rollout.reward:label_reward") is label_reward
    module = types.ModuleType("hooks_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Reward:
        def __call__(self, sample: object) -> float:
            return 1.0

    reward = Reward()
    setattr(module, "reward", reward)
    assert load_hook("hooks_of_this_test:reward") is reward
