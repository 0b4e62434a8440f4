"""The public names, pinned: a change here is a change for users and belongs in the changelog."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
from types import ModuleType

import pytest

import rl_metrics

TOP = [
    "AGGREGATIONS",
    "Aggregation",
    "ContextParallel",
    "GeometryError",
    "KeyAgreementError",
    "Layout",
    "Metric",
    "MetricsError",
    "MicroBatchMetrics",
    "Moments",
    "PackedResponses",
    "QuantileSketch",
    "ResponseSlice",
    "TrainerHook",
    "calculates_per_token_loss",
    "chunk_ranges",
    "count_step_units",
    "ddp_loss_scale",
    "fsdp_loss_scale",
    "hf_trainer_loss_scale",
    "loss_denominators",
    "megatron_loss_scale",
    "merge_metrics",
    "merge_moments",
    "packed_response_rows",
    "packed_responses",
    "packed_token_index",
    "padded_lengths",
    "prompt_denominators",
    "report",
    "response_owner",
    "response_slice",
    "rollout_denominators",
    "rollout_log_diagnostic",
    "rollout_log_metric_contribution",
    "rollout_metric",
    "rollout_shares",
]
TORCH = [
    "StepDivisors",
    "TensorMetric",
    "all_reduce_metrics",
    "gather_and_reduce_log_dict",
    "gather_responses",
    "get_sum_of_sample_mean",
    "loss_reducer",
    "masked_whiten",
    "megatron_num_tokens",
    "padded_loss_reducer",
    "reduce_train_step_metrics",
    "slice_response",
    "slice_tokens",
    "step_divisors",
]


def _modules() -> list[ModuleType]:
    names = [
        name
        for _, name, _ in pkgutil.walk_packages(rl_metrics.__path__, "rl_metrics.")
        if not name.endswith("__main__")
    ]
    has_torch = importlib.util.find_spec("torch") is not None
    needs_torch = re.compile(r"\.torch|\.selftest\.(layout_checks|processes)")
    modules = [
        importlib.import_module(name) for name in names if has_torch or not needs_torch.search(name)
    ]
    assert all(module.__doc__ for module in modules)
    # A folder's own module holds its docstring alone.
    return [module for module in modules if hasattr(module, "__all__")]


def test_the_top_level_names() -> None:
    assert rl_metrics.__all__ == TOP
    assert all(hasattr(rl_metrics, name) for name in TOP)


def test_the_torch_names() -> None:
    pytest.importorskip("torch")
    assert importlib.import_module("rl_metrics.torch").__all__ == TORCH


def test_every_module_declares_its_names_and_documents_all_that_is_public() -> None:
    for module in _modules():
        assert module.__doc__, module.__name__
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                assert inspect.getdoc(thing), f"{module.__name__}.{name}"
            if inspect.isclass(thing) and thing.__module__.startswith("rl_metrics"):
                for attribute, member in vars(thing).items():
                    if not attribute.startswith("_") and callable(
                        getattr(member, "__func__", member)
                    ):
                        assert inspect.getdoc(getattr(thing, attribute)), (
                            f"{module.__name__}.{name}.{attribute}"
                        )


def test_every_error_is_a_value_error() -> None:
    errors = importlib.import_module("rl_metrics.errors")
    assert all(issubclass(getattr(errors, name), ValueError) for name in errors.__all__)
