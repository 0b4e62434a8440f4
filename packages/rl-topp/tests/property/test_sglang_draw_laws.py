"""Laws of the kept sets that the SGLang plugin computes and samples from."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stubs.near_ties import FLOAT32_ROUNDING, check_nucleus, check_order

from rl_topp.reference import softmax

torch = pytest.importorskip("torch")
draw_module = pytest.importorskip("rl_topp.sglang.draw")
Filters, draw_step = draw_module.Filters, draw_module.draw_step
StepRows = pytest.importorskip("rl_topp.sglang.step").StepRows

Array = npt.NDArray[Any]
Batch = tuple[Array, list[int], list[float], list[float]]
"""Probabilities [B, V], and top-k, top-p and min-p of each row."""


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw multiples of 2**-12 as probabilities: ties are many, and float32 sums exact."""
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [
        rng.multinomial(
            4096, rng.dirichlet(np.full(vocab_size, draw(st.sampled_from([0.05, 0.5, 5.0]))))
        )
        for _ in range(num_rows)
    ]
    probs = np.stack(rows) / 4096
    top_k = [draw(st.sampled_from([1, 2, 7, 40, 1 << 30])) for _ in range(num_rows)]
    top_p = [draw(st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.0])) for _ in range(num_rows)]
    min_p = [draw(st.sampled_from([0.0, 0.03, 0.3])) for _ in range(num_rows)]
    return probs, top_k, top_p, min_p


def filters(top_k: list[int], top_p: list[float], min_p: list[float]) -> Any:
    return Filters(
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor(top_p),
        min_ps=torch.tensor(min_p) if any(min_p) else None,
    )


def check_sets(batch: Batch, found: Sequence[tuple[int, Any, float]]) -> None:
    """Compare each row's set with the float64 reference, but for near ties; its ids descend."""
    for row, k, p, m, (_, ids, _) in zip(*batch, found, strict=True):
        check_nucleus(
            ids,
            row,
            top_k=min(k, row.size),
            top_p=float(np.float32(p)),
            min_p=float(np.float32(m)),
            rounding=FLOAT32_ROUNDING,
        )
        check_order(ids, row, rounding=FLOAT32_ROUNDING)


def multinomial(weights: Any, rows: Any) -> Any:
    return torch.multinomial(weights, 1)


def drawn(
    batch: Batch,
    *,
    prefix_size: int = 1024,
    is_filtered: Sequence[bool] | None = None,
    draw: Callable[[Any, Any], Any] = multinomial,
) -> list[tuple[int, Any, float]]:
    probs, top_k, top_p, min_p = batch
    is_filtered = [True] * len(probs) if is_filtered is None else is_filtered
    step = draw_step(
        torch.tensor(probs, dtype=torch.float32),
        filters(top_k, top_p, min_p),
        is_filtered,
        draw,
        prefix_size=prefix_size,
    )
    rows = StepRows(step, [True] * len(probs))
    return [(int(step.ids_B[b]), *rows.row(b)) for b in range(len(probs))]


@given(batches(), st.sampled_from([1, 2, 5, 1024]))
def test_sets_equal_the_float64_reference_whatever_the_prefix(
    batch: Batch, prefix_size: int
) -> None:
    check_sets(batch, drawn(batch, prefix_size=prefix_size))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 2.0, 8.0]), st.sampled_from([3, 1024]))
def test_sets_of_random_models_equal_the_float64_reference(
    seed: int, spread: float, prefix_size: int
) -> None:
    """Hidden states times an output weight, some rows of which differ by rounding only."""
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(4, 8)), rng.normal(size=(60, 8))
    weight[30:] = weight[:30] * (1 + rng.choice([0.0, 1e-8, 1.0], (30, 1)))
    probs = softmax(spread * hidden @ weight.T / 8**0.5)
    batch = probs, [1 << 30, 1 << 30, 7, 20], [0.5, 0.9, 1.0, 0.95], [0.0, 0.0, 0.0, 0.03]
    check_sets(batch, drawn(batch, prefix_size=prefix_size))


@given(batches())
def test_a_sampled_id_is_in_its_set_and_its_log_prob_is_renormalised(batch: Batch) -> None:
    for row, (sampled, ids, log_prob) in zip(batch[0], drawn(batch, prefix_size=3), strict=True):
        assert sampled in ids
        assert log_prob == pytest.approx(np.log(row[sampled] / row[ids].sum()), abs=1e-5)


@given(batches(), st.data())
def test_rows_without_a_filter_have_no_set_and_the_full_log_prob(
    batch: Batch, data: st.DataObject
) -> None:
    is_filtered = data.draw(st.lists(st.booleans(), min_size=len(batch[0]), max_size=len(batch[0])))
    for filtered, row, (sampled, ids, log_prob) in zip(
        is_filtered, batch[0], drawn(batch, is_filtered=is_filtered), strict=True
    ):
        if filtered:
            assert sampled in ids
        else:
            assert ids is None
            assert log_prob == pytest.approx(np.log(row[sampled]), abs=1e-5)


def test_the_worked_example_gives_its_set_and_log_prob() -> None:
    batch = np.array([[0.2, 0.5, 0.3]]), [1 << 30], [0.5], [0.0]
    ((sampled, ids, log_prob),) = drawn(
        batch, draw=lambda weights, rows: torch.zeros(1, 1, dtype=torch.int64)
    )
    assert (sampled, ids) == (1, [1, 2])
    assert log_prob == pytest.approx(-0.47, abs=1e-3)
