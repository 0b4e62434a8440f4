"""The handed cases: values that must come out the same for every split and layout, by the reference and by the tensor code."""

import math

import numpy as np
import pytest
import torch

from rl_metrics import ContextParallel, Metric, count_step_units, loss_denominators, merge_metrics, response_owner, response_slice
from rl_metrics.loss_reduction import aggregate
from rl_metrics.torch import loss_reducer

AGGREGATED = [
    "token_mean_100_and_900",
    "sample_mean_100_and_900",
    "token_mean_two_and_eight",
    "rollout_mean_siblings_weighted_by_tokens",
    "prompt_mean",
    "prompt_mean_is_token_weighted_inside_the_group",
    "mask_with_holes",
    "nan_at_a_masked_position",
    "all_masked",
    "fully_masked_rollout_counts_as_a_unit",
    "constant_divisor",
]


def _step(case: dict) -> tuple[list[np.ndarray], list[np.ndarray], dict]:
    """Values, masks and the ids of a case's samples."""
    values, masks, ids = [], [], {}
    for sample in case["samples"]:
        given = sample["values"] if "values" in sample else [sample["value"]] * sample["tokens"]
        values.append(np.array([math.nan if value == "nan" else value for value in given], np.float64))
        masks.append(np.array(sample.get("mask", [1] * len(given)), np.int32))
        for key in ("rollout_id", "group_id"):
            if key in sample:
                ids.setdefault(f"{key}s", []).append(sample[key])
    if "constant" in case:
        ids["constant"] = case["constant"]
    return values, masks, ids


def test_every_handed_case_is_used(handed_cases):
    others = {"declared_kind_not_guessed_from_the_name", "last_response_token_ownership"}
    assert set(handed_cases) == set(AGGREGATED) | others


@pytest.mark.parametrize("name", AGGREGATED)
def test_reference_gives_the_handed_value(handed_cases, name):
    case = handed_cases[name]
    values, masks, ids = _step(case)
    expected = case["expect"]
    value = aggregate(case["aggregation"], values, masks, **ids)
    assert value is None if expected is None else value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AGGREGATED)
def test_tensor_reducer_gives_the_handed_value_one_micro_batch_per_sample(handed_cases, name, dtype, cp_size):
    case = handed_cases[name]
    values, masks, ids = _step(case)
    aggregation = case["aggregation"]
    constant = ids.pop("constant", None)
    denominators = loss_denominators(aggregation, masks, **ids)
    units = count_step_units(aggregation, masks, **ids, constant=constant)
    total = 0.0
    for value, mask, denominator in zip(values, masks, denominators, strict=True):
        prompt, response = 3, len(value)
        for rank in range(cp_size):
            cp = ContextParallel(size=cp_size, rank=rank)
            owned = response_slice(prompt + response, response, cp).response_indices
            x = torch.tensor(value[owned], dtype=dtype, requires_grad=True)
            reduce = loss_reducer(aggregation, [prompt + response], [response], [mask], denominators=[denominator], cp=cp)
            loss = reduce(x)
            loss.backward()
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()
            assert (x.grad[torch.from_numpy(mask[owned] == 0)] == 0).all()
            total += loss.item()
    if case["expect"] is None:
        assert total == case["loss"]
        assert units == 0
    else:
        assert total / units == pytest.approx(case["expect"], rel=1e-6)


def test_kind_is_declared_not_guessed_from_the_name(handed_cases):
    case = handed_cases["declared_kind_not_guessed_from_the_name"]
    records = [Metric.of_mean(name, value, 1.0) for name, values in case["metrics"].items() for value in values]
    assert {name: metric.value for name, metric in merge_metrics(records).items()} == case["expect"]


def test_last_response_token_has_the_handed_owner(handed_cases):
    case = handed_cases["last_response_token_ownership"]
    owner = response_owner(case["total_length"], case["response_length"], case["response_index"], case["cp_size"])
    assert owner == (case["expect"]["rank"], case["expect"]["local_index"])
