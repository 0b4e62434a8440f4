"""Laws of the kept sets that the SGLang plugin computes and samples from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_topp.reference import nucleus

torch = pytest.importorskip("torch")
kept_sets = pytest.importorskip("rl_topp.sglang_plugin_kept")
Filters, find_kept, listed_ids = kept_sets.Filters, kept_sets.find_kept, kept_sets.listed_ids
sample, sample_all = kept_sets.sample, kept_sets.sample_all


@st.composite
def batches(draw):
    """Probabilities that are multiples of 2**-12, so that float32 sums are exact and no id lies on a boundary by rounding."""
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [rng.multinomial(4096, rng.dirichlet(np.full(vocab_size, draw(st.sampled_from([0.05, 0.5, 5.0]))))) for _ in range(num_rows)]
    probs = np.stack(rows) / 4096
    top_k = [draw(st.sampled_from([1, 2, 7, 40, 1 << 30])) for _ in range(num_rows)]
    top_p = [draw(st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.0])) for _ in range(num_rows)]
    min_p = [draw(st.sampled_from([0.0, 0.03, 0.3])) for _ in range(num_rows)]
    return probs, top_k, top_p, min_p


def filters(top_k, top_p, min_p):
    return Filters(
        top_ks=torch.tensor(top_k, dtype=torch.int32), top_ps=torch.tensor(top_p), min_ps=torch.tensor(min_p) if any(min_p) else None
    )


def expected_sets(probs, top_k, top_p, min_p):
    """The reference's sets without ids of probability 0, which no sampler picks."""
    for row, k, p, m in zip(probs, top_k, top_p, min_p, strict=True):
        kept = nucleus(row, top_k=min(k, row.size), top_p=float(np.float32(p)), min_p=float(np.float32(m)))
        yield row, kept[row[kept] > 0]


@given(batches(), st.sampled_from([1, 2, 5, 1024]))
def test_sets_equal_the_float64_reference_whatever_the_prefix(batch, prefix_size):
    probs, *cuts = batch
    kept = find_kept(torch.tensor(probs, dtype=torch.float32), filters(*cuts), prefix_size=prefix_size)
    flat = listed_ids(kept, kept.counts_B).split(kept.counts_B.tolist())
    for (row, expected), ids in zip(expected_sets(probs, *cuts), flat, strict=True):
        assert len(set(ids.tolist())) == len(ids)
        # Ids of equal probability may stand for one another: sorts break ties as they like.
        assert sorted(row[ids.numpy()]) == sorted(row[expected])


@given(batches())
def test_a_sampled_id_is_in_its_set_and_its_log_prob_is_renormalised(batch):
    probs, *cuts = batch
    kept = find_kept(torch.tensor(probs, dtype=torch.float32), filters(*cuts), prefix_size=3)
    ids, log_probs = sample(kept, lambda weights: torch.multinomial(weights, 1))
    for b, (row, expected) in enumerate(expected_sets(probs, *cuts)):
        members = listed_ids(kept, kept.counts_B)[int(kept.counts_B[:b].sum()) :][: int(kept.counts_B[b])]
        assert int(ids[b]) in members.tolist()
        assert float(log_probs[b]) == pytest.approx(np.log(row[ids[b]] / row[expected].sum()), abs=1e-5)


@given(batches())
def test_without_a_filter_the_log_prob_is_the_full_one(batch):
    probs = torch.tensor(batch[0], dtype=torch.float32)
    ids, log_probs = sample_all(probs, lambda weights: torch.multinomial(weights, 1))
    np.testing.assert_allclose(log_probs, np.log(batch[0][np.arange(len(ids)), ids]), atol=1e-5)


def test_worked_example():
    kept = find_kept(torch.tensor([[0.2, 0.5, 0.3]]), filters([1 << 30], [0.5], [0.0]))
    assert listed_ids(kept, kept.counts_B).tolist() == [1, 2]
    ids, log_probs = sample(kept, lambda weights: torch.zeros(1, 1, dtype=torch.int64))
    assert ids.tolist() == [1]
    assert log_probs.item() == pytest.approx(-0.47, abs=1e-3)
