"""What both scoring functions refuse; autocast and second derivatives change nothing in silence."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet

torch = pytest.importorskip("torch")

from rl_topp.lm_head import nucleus_lm_head_log_probs  # noqa: E402
from rl_topp.torch import build_keep_mask, nucleus_log_probs  # noqa: E402

NUM_ROWS, VOCAB_SIZE, WIDTH = 6, 5, 4
ROWS = NucleusSet.from_lists([[0, 1], [2], None, [3, 4, 0], None, [1]], vocab_size=VOCAB_SIZE)
TARGETS = torch.tensor([0, 2, 3, 4, 1, 1])
LONG = {"full_log_probs": True, "entropy": True, "full_entropy": True}


def _operands() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(count, WIDTH, generator=generator).requires_grad_()
        for count in (NUM_ROWS, VOCAB_SIZE)
    )


def _from_logits(targets: Any = TARGETS, rows: Any = ROWS, **options: Any) -> Any:
    hidden, weight = _operands()
    return nucleus_log_probs(
        (hidden @ weight.t()).detach().requires_grad_(), targets, rows, **options
    )


def _from_hidden(targets: Any = TARGETS, rows: Any = ROWS, **options: Any) -> Any:
    return nucleus_lm_head_log_probs(*_operands(), targets, rows, **options)


both = pytest.mark.parametrize("score", [_from_logits, _from_hidden])


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (TARGETS[:, None], r"shape \[T\], got \[6, 1\]"),
        (TARGETS[None], r"shape \[T\], got \[1, 6\]"),
        (TARGETS.float(), "integers.*float32"),
        (TARGETS.bool(), "integers.*bool"),
        (TARGETS.to(torch.uint16), "integers.*uint16"),
        (TARGETS.to("meta"), "meta; expected one device"),
        (TARGETS[:5], "5 targets for 6 rows"),
        (TARGETS.numpy(), "torch tensor, got ndarray"),
        (TARGETS.tolist(), "torch tensor, got list"),
    ],
)
@both
def test_targets_are_one_integer_per_row_on_the_same_device(
    score: Callable[..., Any], targets: Any, words: str
) -> None:
    with pytest.raises(NucleusError, match=words):
        score(targets)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
@both
def test_the_width_of_the_targets_changes_nothing(score: Callable[..., Any], dtype: Any) -> None:
    assert torch.equal(score(TARGETS.to(dtype)).log_probs, score().log_probs)


@pytest.mark.parametrize(
    "temperature",
    [0, -1.0, float("inf"), float("nan"), None, "1", True, torch.tensor(2.0), torch.ones(6)],
)
@both
def test_a_temperature_is_a_positive_number(score: Callable[..., Any], temperature: Any) -> None:
    with pytest.raises(NucleusError, match="temperature"):
        score(temperature=temperature)


@pytest.mark.parametrize("vocab_start", [-1, 1, 100, 0.0, None])
@both
def test_without_a_group_the_shard_is_the_vocabulary(
    score: Callable[..., Any], vocab_start: Any
) -> None:
    with pytest.raises(NucleusError, match=r"vocab_start|tp_group"):
        score(vocab_start=vocab_start)
    with pytest.raises(NucleusError, match=r"\[0, 5\) of a vocabulary of 6.*tp_group"):
        score(rows=NucleusSet.unfiltered(NUM_ROWS, vocab_size=VOCAB_SIZE + 1))


@both
def test_lists_are_not_kept_sets(score: Callable[..., Any]) -> None:
    with pytest.raises(NucleusError, match=r"NucleusSet\.from_lists"):
        score(rows=[[0]] * NUM_ROWS)


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(6, 5, dtype=torch.int64),
        torch.zeros(1, 6, 5),
        torch.zeros(6, 5, device="meta"),
        np.zeros((6, 5)),
    ],
)
def test_logits_are_a_matrix_of_floating_point_numbers(logits: Any) -> None:
    with pytest.raises(NucleusError, match="logits"):
        nucleus_log_probs(logits, TARGETS, ROWS)


def test_a_mask_needs_targets_and_a_shard_that_exists() -> None:
    for options in ({"vocab_start": -1}, {"num_local_ids": -1}, {"num_local_ids": 2.0}):
        with pytest.raises(NucleusError, match="at least 0"):
            build_keep_mask(TARGETS, ROWS, **cast(Any, options))
    with pytest.raises(NucleusError, match="integers"):
        build_keep_mask(TARGETS.float(), ROWS)


@pytest.mark.parametrize("options", [{}, LONG, {"method": "blocked"}, {"method": "sparse"}])
@pytest.mark.parametrize("backward_too", [False, True])
@both
def test_autocast_changes_nothing(
    score: Callable[..., Any], backward_too: bool, options: dict[str, Any]
) -> None:
    if score is _from_logits:
        options = {name: value for name, value in options.items() if name != "method"}
    hidden, weight = _operands()

    def run(*, autocast: bool) -> list[Any]:
        operands = [hidden, weight] if score is _from_hidden else [(hidden @ weight.t()).detach()]
        operands = [operand.detach().clone().requires_grad_() for operand in operands]
        function: Any = nucleus_lm_head_log_probs if score is _from_hidden else nucleus_log_probs
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = function(*operands, TARGETS, ROWS, **options)
            if backward_too:
                found.log_probs.sum().backward()
        if not backward_too:
            found.log_probs.sum().backward()
        return [found.log_probs, *(operand.grad for operand in operands)]

    for plain, cast_too in zip(run(autocast=False), run(autocast=True), strict=True):
        assert torch.equal(plain, cast_too)


@both
def test_second_derivatives_are_refused_not_left_out(score: Callable[..., Any]) -> None:
    with pytest.raises(NucleusError, match="create_graph"):
        torch.autograd.backward(score().log_probs.sum(), create_graph=True)
