"""`nucleus_log_probs` and `build_keep_mask` against the float64 reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, reference

torch = pytest.importorskip("torch")

from rl_topp.torch import build_keep_mask, from_logits, nucleus_log_probs  # noqa: E402

ALL = ("log_probs", "full_log_probs", "entropy", "full_entropy")
NUM_ROWS, VOCAB_SIZE = 30, 17


@pytest.fixture
def case(random_rows: Callable[..., NucleusSet]) -> tuple[np.ndarray, np.ndarray, NucleusSet]:
    rng = np.random.default_rng(0)
    return (
        3.0 * rng.normal(size=(NUM_ROWS, VOCAB_SIZE)),
        rng.integers(0, VOCAB_SIZE, NUM_ROWS),
        random_rows(rng, NUM_ROWS, VOCAB_SIZE),
    )


def _all_scores(logits: Any, targets: Any, rows: NucleusSet, **options: Any) -> tuple[Any, ...]:
    scores = nucleus_log_probs(
        logits, targets, rows, full_log_probs=True, entropy=True, full_entropy=True, **options
    )
    return tuple(getattr(scores, name) for name in ALL)


@pytest.mark.parametrize("on_truncated", ["mask", "full"])
def test_values_and_gradients_match_the_reference(on_truncated: Any, case: Any) -> None:
    values, targets, rows = case
    options = {"temperature": 0.7, "on_truncated": on_truncated}
    expected = reference.nucleus_scores(values, targets, rows, **options)
    logits = torch.tensor(values, requires_grad=True)
    wanted = torch.tensor(targets)
    for name, score in zip(ALL, _all_scores(logits, wanted, rows, **options), strict=True):
        np.testing.assert_allclose(score.detach().numpy(), getattr(expected, name), atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: _all_scores(x, wanted, rows, **options), (logits,))
    torch.autograd.backward(nucleus_log_probs(logits, wanted, rows, **options).log_probs.sum())
    support = reference.keep_mask(rows, targets, on_truncated=on_truncated)
    np.testing.assert_allclose(
        logits.grad.numpy(),
        reference.score_gradient(values, targets, support, temperature=0.7),
        atol=1e-12,
    )


def test_the_gradient_is_zero_outside_the_sets_and_for_rows_without_a_score(case: Any) -> None:
    values, targets, rows = case
    logits = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    torch.autograd.backward(nucleus_log_probs(logits, torch.tensor(targets), rows).log_probs.sum())
    outside = ~reference.keep_mask(rows, targets)
    assert (logits.grad.numpy()[outside] == 0.0).all()


def test_small_blocks_change_nothing(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values, targets, rows = case
    logits, wanted = torch.tensor(values), torch.tensor(targets)
    whole = _all_scores(logits, wanted, rows)
    monkeypatch.setattr(from_logits, "_BLOCK_BYTES", 3 * VOCAB_SIZE * 8)
    for score, expected in zip(_all_scores(logits, wanted, rows), whole, strict=True):
        torch.testing.assert_close(score, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32(dtype: Any, case: Any) -> None:
    values, targets, rows = case
    logits = torch.tensor(values).to(dtype).requires_grad_()
    scores = nucleus_log_probs(logits, torch.tensor(targets), rows)
    expected = reference.nucleus_scores(logits.detach().double().numpy(), targets, rows)
    assert scores.log_probs.dtype == torch.float32
    np.testing.assert_allclose(scores.log_probs.detach().numpy(), expected.log_probs, atol=2e-6)
    torch.autograd.backward(scores.log_probs.sum())
    assert logits.grad.dtype == dtype


def test_scores_not_asked_for_are_absent(case: Any) -> None:
    values, targets, rows = case
    scores = nucleus_log_probs(torch.tensor(values), torch.tensor(targets), rows)
    assert scores.full_log_probs is scores.entropy is scores.full_entropy is None


def test_padding_columns_count_nowhere() -> None:
    rows = NucleusSet.unfiltered(1, vocab_size=2)
    logits = torch.tensor([[1.0, 1.0, 50.0]], requires_grad=True)
    scores = nucleus_log_probs(logits, torch.tensor([0]), rows)
    torch.autograd.backward(scores.log_probs.sum())
    assert scores.log_probs.item() == pytest.approx(-np.log(2))
    assert logits.grad[0, 2] == 0.0


def test_without_a_filter_it_is_the_plain_log_softmax(case: Any) -> None:
    values, targets, _ = case
    logits, wanted = torch.tensor(values, dtype=torch.float32), torch.tensor(targets)
    scores = nucleus_log_probs(
        logits, wanted, NucleusSet.unfiltered(NUM_ROWS, vocab_size=VOCAB_SIZE)
    )
    expected = torch.log_softmax(logits, dim=1).gather(1, wanted[:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-6, rtol=0)


def test_a_target_outside_the_vocabulary_cannot_pass_unseen() -> None:
    rows = NucleusSet.from_lists([[0, 1], None], vocab_size=3)
    assert nucleus_log_probs(torch.zeros(2, 3), torch.tensor([7, 7]), rows).log_probs.tolist() == [
        -np.inf,
        -np.inf,
    ]


def test_a_call_without_rows_scores_nothing() -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    scores = nucleus_log_probs(
        logits, torch.zeros(0, dtype=torch.long), NucleusSet.empty(vocab_size=4)
    )
    torch.autograd.backward(scores.log_probs.sum())
    assert logits.grad.shape == (0, 4)


@pytest.mark.parametrize("on_truncated", ["mask", "full"])
def test_the_mask_is_the_reference_s_shard(on_truncated: Any, case: Any) -> None:
    _, targets, rows = case
    expected = reference.keep_mask(rows, targets, on_truncated=on_truncated)
    mask = build_keep_mask(torch.tensor(targets), rows, on_truncated=on_truncated)
    np.testing.assert_array_equal(mask.numpy(), expected)
    shard = build_keep_mask(
        torch.tensor(targets), rows, on_truncated=on_truncated, vocab_start=12, num_local_ids=8
    )
    np.testing.assert_array_equal(shard.numpy(), np.pad(expected[:, 12:], ((0, 0), (0, 3))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": NucleusSet.unfiltered(2, vocab_size=4)}, "sets of 2 rows for 3 rows"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, "2 targets for 3 rows"),
        ({"temperature": 0.0}, "temperature must be positive and finite.* got 0.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"on_truncated": "drop"}, "'drop'"),
        ({"logits": torch.zeros(3)}, "shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    inputs: dict[str, Any] = {
        "logits": torch.zeros(3, 4),
        "targets": torch.zeros(3, dtype=torch.long),
        "rows": NucleusSet.unfiltered(3, vocab_size=4),
    } | change
    logits, targets, rows = (inputs.pop(name) for name in ("logits", "targets", "rows"))
    with pytest.raises(NucleusError, match=words):
        nucleus_log_probs(logits, targets, rows, **inputs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "rows", [NucleusSet.from_lists([[0, 1]], vocab_size=3), NucleusSet.unfiltered(1, vocab_size=3)]
)
def test_a_diverged_model_never_looks_like_a_row_without_a_score(
    rows: NucleusSet, bad: float
) -> None:
    scores = nucleus_log_probs(torch.tensor([[0.5, bad, 0.0]]), torch.tensor([0]), rows)
    assert not np.isfinite(scores.log_probs.item())


@pytest.mark.parametrize("nucleus", [[0, 1], [0], None])
def test_a_support_of_nothing_but_minus_infinity_scores_nan(nucleus: list[int] | None) -> None:
    """As in a softmax: such a row has no probability, while 0 would say probability 1."""
    rows = NucleusSet.from_lists([nucleus, [1, 2]], vocab_size=3).append(
        NucleusSet.not_sampled(1, vocab_size=3)
    )
    support = [0, 1, 2] if nucleus is None else nucleus
    values = torch.zeros(3, 3)
    values[0, support] = -torch.inf
    logits = values.requires_grad_()
    scores = nucleus_log_probs(logits, torch.tensor([0, 2, 0]), rows, entropy=True)
    for score in (scores.log_probs, scores.entropy):
        assert score is not None
        assert score.isnan().tolist() == [True, False, False]
        assert score[2] == 0.0
    torch.autograd.backward(scores.log_probs.sum())
    assert logits.grad[0].isnan().tolist() == [token in support for token in range(3)]
    assert logits.grad[1:].isfinite().all()
    assert (logits.grad[2] == 0.0).all()


def test_a_vocabulary_of_minus_infinity_scores_nan_in_full_as_well() -> None:
    rows = NucleusSet.from_lists([[0], [0]], vocab_size=2)
    scores = nucleus_log_probs(
        torch.tensor([[-np.inf, -np.inf], [0.0, 0.0]]),
        torch.tensor([0, 0]),
        rows,
        full_log_probs=True,
        full_entropy=True,
    )
    for score in (scores.full_log_probs, scores.full_entropy):
        assert score is not None
        assert score.isnan().tolist() == [True, False]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_what_two_scores_add_to_one_element_is_rounded_once(with_entropy: bool) -> None:
    """Gradients over set and vocabulary nearly cancel where the set has nearly all of the mass."""
    rng = np.random.default_rng(0)
    num_rows, vocab_size = 64, 50
    narrow = torch.from_numpy(3.0 * rng.normal(size=(num_rows, vocab_size))).bfloat16()
    top_ids = narrow.float().topk(40, dim=1).indices
    rows = NucleusSet.from_lists(list(top_ids.numpy()), vocab_size=vocab_size)

    def gradient(logits: Any) -> Any:
        scores = nucleus_log_probs(
            logits,
            top_ids[:, 0],
            rows,
            full_log_probs=True,
            entropy=with_entropy,
            full_entropy=with_entropy,
        )
        assert scores.full_log_probs is not None
        loss = (scores.log_probs - scores.full_log_probs).sum()
        if scores.entropy is not None and scores.full_entropy is not None:
            loss = loss + (scores.entropy - scores.full_entropy).sum()
        torch.autograd.backward(loss)
        return logits.grad

    found, exact = (
        gradient(narrow.to(dtype, copy=True).requires_grad_())
        for dtype in (torch.bfloat16, torch.float64)
    )
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-6)
