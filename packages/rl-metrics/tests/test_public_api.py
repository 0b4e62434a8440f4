"""The public names, pinned: a change here is a change for users and belongs in the changelog."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
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
    "UnsupportedContractError",
    "calculates_per_token_loss",
    "chunk_ranges",
    "count_step_units",
    "loss_denominators",
    "megatron_loss_scale",
    "merge_metrics",
    "merge_moments",
    "packed_response_rows",
    "packed_responses",
    "packed_token_index",
    "padded_lengths",
    "parse_document",
    "prompt_denominators",
    "report",
    "response_owner",
    "response_slice",
    "rollout_denominators",
    "rollout_log_metric_contribution",
    "to_document",
]
TORCH = [
    "all_reduce_metrics",
    "gather_and_reduce_log_dict",
    "gather_responses",
    "get_sum_of_sample_mean",
    "loss_reducer",
    "masked_whiten",
    "megatron_num_tokens",
    "reduce_train_step_metrics",
    "slice_response",
    "slice_tokens",
]


def _modules() -> list[ModuleType]:
    names = [
        name
        for _, name, _ in pkgutil.walk_packages(rl_metrics.__path__, "rl_metrics.")
        if not name.endswith("__main__")
    ]
    has_torch = importlib.util.find_spec("torch") is not None
    return [importlib.import_module(name) for name in names if has_torch or ".torch" not in name]


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


def test_the_contract_entry_point_names_the_contract() -> None:
    entries = importlib.metadata.entry_points(group="rl.contracts.writes")
    assert "metric-record.v1" in {
        entry.name for entry in entries if entry.value == "rl_metrics.contract"
    }
