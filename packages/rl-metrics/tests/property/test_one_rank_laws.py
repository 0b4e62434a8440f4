"""One rank owns everything: no function needs to know the stream, whatever the layout."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    ContextParallel,
    GeometryError,
    Layout,
    chunk_ranges,
    packed_response_rows,
    packed_responses,
    packed_token_index,
    response_owner,
    response_slice,
)
from rl_metrics.aggregation.loss_reduction import loss_reducer

LAYOUTS = get_args(Layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(total=st.integers(2, 60), data=st.data())
def test_one_rank_owns_every_response_token_of_a_sequence(
    layout: Layout, total: int, data: st.DataObject
) -> None:
    response = data.draw(st.integers(0, total - 1))
    cp = ContextParallel(1, 0, layout)
    owned = response_slice(total, response, cp)
    assert owned.response_indices.tolist() == list(range(response))
    # The logit of the first response token stands at the last token of the prompt.
    assert owned.logit_rows.tolist() == list(range(total - response - 1, total - 1))
    covered = [p for start, stop in chunk_ranges(total, cp) for p in range(start, stop)]
    assert covered[:total] == list(range(total))
    for j in range(response):
        assert response_owner(total, response, j, 1, layout=layout) == (0, j)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=6))
def test_functions_of_a_micro_batch_agree_with_those_of_a_sequence(
    layout: Layout, lengths: list[tuple[int, int]]
) -> None:
    cp = ContextParallel(1, 0, layout)
    totals = [prompt + response for prompt, response in lengths]
    responses = [response for _, response in lengths]
    owned = packed_responses(totals, responses, cp)
    assert owned.flat_indices.tolist() == list(range(sum(responses)))
    index = packed_token_index(totals, cp)
    firsts = np.cumsum([0, *totals])
    for i, part in enumerate(packed_response_rows(totals, responses, cp)):
        alone = response_slice(totals[i], responses[i], cp)
        assert part.response_indices.tolist() == alone.response_indices.tolist()
        predicting = index[part.logit_rows] - firsts[i]
        assert predicting.tolist() == alone.logit_rows.tolist()
    reduce = loss_reducer("token_mean", totals, responses, [[1] * r for r in responses], cp=cp)
    assert reduce(np.ones(sum(responses))) == sum(responses)


def test_offsets_of_one_rank_still_shift_its_rows_and_must_not_overlap() -> None:
    cp = ContextParallel(1, 0, "contiguous")
    assert response_slice(5, 2, cp, stream_offset=4).logit_rows.tolist() == [6, 7]
    shifted = packed_responses([5, 4], [2, 1], cp, stream_offsets=[4, 0])
    assert shifted.logit_rows.tolist() == [6, 7, 2]
    with pytest.raises(GeometryError, match="must not overlap"):
        packed_responses([5, 4], [2, 1], cp, stream_offsets=[3, 0])
    with pytest.raises(GeometryError, match="do not fit into a stream of 8 tokens"):
        response_slice(5, 2, cp, stream_offset=4, stream_length=8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_tensors_over_one_rank_are_the_whole(layout: Layout) -> None:
    torch = pytest.importorskip("torch")
    from rl_metrics.torch import gather_responses, slice_response, slice_tokens

    cp = ContextParallel(1, 0, layout)
    values = torch.arange(4.0)
    assert slice_response(values, 7, 4, cp).tolist() == [0, 1, 2, 3]
    assert slice_tokens([torch.arange(7)], cp)[:7].tolist() == list(range(7))
    (restored,) = gather_responses([values], [7], [4], cp, group=None)
    assert restored.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2, 3])
def test_two_ranks_or_more_still_need_the_stream(size: int) -> None:
    cp = ContextParallel(size, 0, "contiguous")
    with pytest.raises(GeometryError, match="needs stream_length"):
        response_slice(12, 4, cp)
    with pytest.raises(GeometryError, match="needs stream_length"):
        chunk_ranges(12, cp)
    with pytest.raises(GeometryError, match="needs stream_length"):
        response_owner(12, 4, 0, size, layout="contiguous")
