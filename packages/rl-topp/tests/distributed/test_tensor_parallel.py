"""Tensor parallelism over gloo: a vocabulary cut over 2 to 4 ranks gives what one process gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusSet

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from rl_topp.lm_head import HiddenGradient, Method, nucleus_lm_head_log_probs  # noqa: E402
from rl_topp.torch import nucleus_log_probs  # noqa: E402

FLOAT32: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
"""Sums over shards are added in another order, and a processor's vector width decides how."""
pytestmark = pytest.mark.distributed

NUM_ROWS, VOCAB_SIZE, WIDTH = 40, 29, 12
SHARDS = {2: [0, 16, 32], 4: [0, 8, 16, 24, 32], 3: [0, 5, 30, 32]}
"""First ids per rank; ids from 29 on are padding of the embedding.

With 3 ranks the last shard is padding and nothing else.
"""
WANTED = ("log_probs", "full_log_probs", "entropy", "full_entropy")


def _inputs(rows: NucleusSet) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "rows": rows,
        "hidden": torch.randn(NUM_ROWS, WIDTH, generator=generator),
        "weight": torch.randn(32, WIDTH, generator=generator) * 0.5,
        "targets": torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator),
        "upstream": torch.randn(len(WANTED), NUM_ROWS, generator=generator),
    }


def _loss(scores: Any, upstream: Any) -> Any:
    return sum(
        (getattr(scores, name) * weight).sum()
        for name, weight in zip(WANTED, upstream, strict=True)
    )


OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "on_truncated": "full",
    "full_log_probs": True,
    "entropy": True,
    "full_entropy": True,
}


def _from_logits(inputs: dict[str, Any], start: int, stop: int, group: Any) -> tuple[Any, ...]:
    logits = (inputs["hidden"] @ inputs["weight"].t())[:, start:stop].clone().requires_grad_()
    scores = nucleus_log_probs(
        logits, inputs["targets"], inputs["rows"], vocab_start=start, tp_group=group, **OPTIONS
    )
    _loss(scores, inputs["upstream"]).backward()
    return tuple(getattr(scores, name).detach().numpy() for name in WANTED), logits.grad.numpy()


def _from_hidden(
    inputs: dict[str, Any],
    start: int,
    stop: int,
    group: Any,
    method: Method,
    hidden_gradient: HiddenGradient,
) -> tuple[Any, ...]:
    hidden = inputs["hidden"].clone().requires_grad_()
    weight = inputs["weight"][start:stop].clone().requires_grad_()
    scores = nucleus_lm_head_log_probs(
        hidden,
        weight,
        inputs["targets"],
        inputs["rows"],
        vocab_start=start,
        tp_group=group,
        method=method,
        hidden_gradient=hidden_gradient,
        block_bytes=1000,
        **OPTIONS,
    )
    _loss(scores, inputs["upstream"]).backward()
    return (
        tuple(getattr(scores, name).detach().numpy() for name in WANTED),
        hidden.grad.numpy(),
        weight.grad.numpy(),
    )


def _logits_rank(rank: int, world_size: int, inputs: dict[str, Any]) -> tuple[Any, ...]:
    return _from_logits(
        inputs, SHARDS[world_size][rank], SHARDS[world_size][rank + 1], dist.group.WORLD
    )


def _hidden_rank(
    rank: int,
    world_size: int,
    inputs: dict[str, Any],
    method: Method,
    hidden_gradient: HiddenGradient,
) -> tuple[Any, ...]:
    return _from_hidden(
        inputs,
        SHARDS[world_size][rank],
        SHARDS[world_size][rank + 1],
        dist.group.WORLD,
        method,
        hidden_gradient,
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_scores_from_logits_do_not_depend_on_the_shards(
    world_size: int, run_ranks: Callable[..., Any], random_rows: Callable[..., NucleusSet]
) -> None:
    inputs = _inputs(random_rows(np.random.default_rng(1), NUM_ROWS, VOCAB_SIZE))
    expected, expected_gradient = _from_logits(inputs, 0, 32, None)
    ranks = run_ranks(_logits_rank, world_size, inputs)
    for scores, _ in ranks:
        np.testing.assert_allclose(scores, expected, **FLOAT32)
    np.testing.assert_allclose(
        np.concatenate([gradient for _, gradient in ranks], axis=1), expected_gradient, **FLOAT32
    )


@pytest.mark.parametrize("method", ["sparse", "blocked"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_scores_from_hidden_states_do_not_depend_on_the_shards(
    world_size: int,
    method: Method,
    run_ranks: Callable[..., Any],
    random_rows: Callable[..., NucleusSet],
) -> None:
    inputs = _inputs(random_rows(np.random.default_rng(2), NUM_ROWS, VOCAB_SIZE))
    expected, expected_hidden, expected_weight = _from_hidden(
        inputs, 0, 32, None, method, "all_reduce"
    )
    ranks = run_ranks(_hidden_rank, world_size, inputs, method, "all_reduce")
    for scores, hidden_gradient, _ in ranks:
        np.testing.assert_allclose(scores, expected, **FLOAT32)
        np.testing.assert_allclose(hidden_gradient, expected_hidden, **FLOAT32)
    np.testing.assert_allclose(
        np.concatenate([gradient for *_, gradient in ranks]), expected_weight, **FLOAT32
    )


def test_partial_hidden_gradients_sum_to_the_whole(
    run_ranks: Callable[..., Any], random_rows: Callable[..., NucleusSet]
) -> None:
    inputs = _inputs(random_rows(np.random.default_rng(3), NUM_ROWS, VOCAB_SIZE))
    _, expected, _ = _from_hidden(inputs, 0, 32, None, "auto", "all_reduce")
    parts = [
        hidden_gradient
        for _, hidden_gradient, _ in run_ranks(_hidden_rank, 2, inputs, "auto", "partial")
    ]
    np.testing.assert_allclose(sum(parts), expected, **FLOAT32)
    assert not np.allclose(parts[0], expected, atol=1e-3)


def test_ranks_without_any_scored_row_still_meet_in_the_collectives(
    run_ranks: Callable[..., Any],
) -> None:
    inputs = _inputs(NucleusSet.not_sampled(NUM_ROWS, vocab_size=VOCAB_SIZE))
    for scores, hidden_gradient, weight_gradient in run_ranks(
        _hidden_rank, 2, inputs, "auto", "all_reduce"
    ):
        assert not np.any(scores)
        assert not np.any(hidden_gradient)
        assert not np.any(weight_gradient)


def test_a_support_of_minus_infinity_on_every_shard_scores_nan_on_every_rank(
    run_ranks: Callable[..., Any],
) -> None:
    rows = NucleusSet.from_lists([[1, 20], [1, 20], [1], None], vocab_size=VOCAB_SIZE).append(
        NucleusSet.not_sampled(NUM_ROWS - 4, vocab_size=VOCAB_SIZE)
    )
    inputs = _inputs(rows)
    inputs["hidden"][[0, 2, 3, 5]] = 3e38
    inputs["weight"][:] = -10.0
    for scores, _ in run_ranks(_logits_rank, 2, inputs):
        for score in scores:
            assert np.flatnonzero(np.isnan(score)).tolist() == [0, 2, 3]
            assert (score[4:] == 0.0).all()
