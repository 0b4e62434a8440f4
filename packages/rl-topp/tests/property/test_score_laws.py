"""Laws of the scores, on random logits and sets."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_topp import NucleusSet, reference

torch = pytest.importorskip("torch")

from rl_topp.lm_head import nucleus_lm_head_log_probs  # noqa: E402
from rl_topp.torch import nucleus_log_probs  # noqa: E402
from rl_topp.torch.dense_rows import block_statistics, merge_statistics  # noqa: E402
from rl_topp.torch.scores import combine  # noqa: E402

SEEDS = st.integers(0, 2**32 - 1)


def _random(
    seed: int, num_rows: int = 6, vocab_size: int = 11
) -> tuple[np.ndarray, np.ndarray, NucleusSet]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=rng.choice([0.1, 3.0, 30.0]), size=(num_rows, vocab_size))
    rows = reference.nucleus_of_logits(logits, top_p=rng.uniform(0.05, 1.0))
    targets = np.array([rng.choice(ids) for ids in rows])
    return logits, targets, rows


@given(SEEDS)
def test_kept_set_probabilities_sum_to_one(seed: int) -> None:
    logits, _, rows = _random(seed)
    for token, ids in enumerate(rows):
        repeated = torch.tensor(logits[[token] * ids.size])
        scores = nucleus_log_probs(repeated, torch.tensor(ids), rows.take([token] * ids.size))
        assert float(scores.log_probs.exp().sum()) == pytest.approx(1.0, abs=1e-9)


@given(SEEDS)
def test_renormalising_over_the_set_adds_minus_the_log_of_its_mass(seed: int) -> None:
    logits, targets, rows = _random(seed)
    scores = nucleus_log_probs(
        torch.tensor(logits), torch.tensor(targets), rows, full_log_probs=True
    )
    mass = [reference.softmax(row)[ids].sum() for row, ids in zip(logits, rows, strict=True)]
    assert scores.full_log_probs is not None
    np.testing.assert_allclose(
        (scores.full_log_probs - scores.log_probs).numpy(), np.log(mass), atol=1e-9
    )


@given(SEEDS, st.floats(-50, 50))
def test_adding_a_constant_to_a_row_changes_no_score(seed: int, shift: float) -> None:
    logits, targets, rows = _random(seed)
    left, right = (
        nucleus_log_probs(torch.tensor(values), torch.tensor(targets), rows, entropy=True)
        for values in (logits, logits + shift)
    )
    torch.testing.assert_close(left.log_probs, right.log_probs, atol=1e-9, rtol=0)
    torch.testing.assert_close(left.entropy, right.entropy, atol=1e-9, rtol=0)


@given(SEEDS)
def test_the_order_inside_a_set_is_free(seed: int) -> None:
    logits, targets, rows = _random(seed)
    rng = np.random.default_rng(seed)
    shuffled = NucleusSet.from_lists(
        [rng.permutation(ids) for ids in rows], vocab_size=rows.vocab_size
    )
    left, right = (
        nucleus_log_probs(torch.tensor(logits), torch.tensor(targets), sets).log_probs
        for sets in (rows, shuffled)
    )
    torch.testing.assert_close(left, right, atol=1e-12, rtol=0)


@given(SEEDS)
def test_entropy_lies_between_zero_and_the_log_of_the_set_s_size(seed: int) -> None:
    logits, targets, rows = _random(seed)
    entropy: Any = nucleus_log_probs(
        torch.tensor(logits), torch.tensor(targets), rows, entropy=True
    ).entropy
    assert (entropy.numpy() >= -1e-9).all()
    assert (entropy.numpy() <= np.log(rows.set_sizes) + 1e-9).all()


@given(SEEDS, st.lists(st.integers(0, 11), max_size=4))
def test_any_cut_of_the_vocabulary_merges_to_the_same_statistics(
    seed: int, cuts: list[int]
) -> None:
    logits, targets, _ = _random(seed)
    logits[0, :5] = -np.inf
    z, wanted = torch.tensor(logits), torch.tensor(targets)
    edges = [0, *sorted(cuts), 11]
    parts = [block_statistics(z[:, a:b], wanted, first_id=a) for a, b in pairwise(edges)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge_statistics(merged, part)
    whole = block_statistics(z, wanted, first_id=0)
    found, expected = (combine(statistics[None], None) for statistics in (merged, whole))
    for name in ("log_probs", "entropy", "log_normaliser"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), atol=1e-9, rtol=1e-9
        )


@settings(max_examples=60)
@given(SEEDS, st.sampled_from(["auto", "sparse", "blocked"]), st.integers(1, 5000))
def test_the_head_equals_the_scores_of_its_logits(seed: int, method: Any, block_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, vocab_size, width = (int(rng.integers(1, limit)) for limit in (9, 14, 7))
    hidden, weight = (
        torch.tensor(rng.normal(size=(count, width)), requires_grad=True)
        for count in (num_rows, vocab_size)
    )
    status = rng.integers(0, 4, num_rows)
    rows = NucleusSet.concat(
        [
            NucleusSet.from_lists(
                [rng.choice(vocab_size, rng.integers(1, vocab_size + 1), replace=False)],
                vocab_size=vocab_size,
            )
            if kind == 0
            else NucleusSet(
                ids=np.zeros(0, np.int32),
                offsets=np.zeros(2, np.int64),
                status=np.array([kind], np.uint8),
                vocab_size=vocab_size,
            )
            for kind in status
        ]
    )
    targets = torch.tensor(rng.integers(0, vocab_size, num_rows))
    upstream = torch.tensor(rng.normal(size=(2, num_rows)))

    def gradients(scores: Any) -> tuple[Any, ...]:
        loss = (scores.log_probs * upstream[0] + scores.entropy * upstream[1]).sum()
        return (scores.log_probs, *torch.autograd.grad(loss, (hidden, weight)))

    expected = gradients(nucleus_log_probs(hidden @ weight.t(), targets, rows, entropy=True))
    found = gradients(
        nucleus_lm_head_log_probs(
            hidden, weight, targets, rows, entropy=True, method=method, block_bytes=block_bytes
        )
    )
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-9)
