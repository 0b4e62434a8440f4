"""The packed stream on worked numbers, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from rl_metrics import (
    ContextParallel,
    GeometryError,
    packed_response_rows,
    packed_responses,
    packed_token_index,
    padded_lengths,
)


def test_padded_lengths_round_up() -> None:
    assert padded_lengths([13, 3], ContextParallel(2, 0)).tolist() == [16, 4]
    assert padded_lengths([13, 3], ContextParallel(2, 0), pad_multiple=8).tolist() == [16, 8]
    assert padded_lengths([13, 3], ContextParallel(2, 0, "contiguous")).tolist() == [13, 3]


def test_a_local_stream_holds_two_chunks_of_every_sequence() -> None:
    # 6 tokens: chunks of 2, the last one padding; 3 tokens: chunks of 1, the last one padding.
    assert packed_token_index([6, 3], ContextParallel(2, 0)).tolist() == [0, 1, -1, -1, 6, -1]
    assert packed_token_index([6, 3], ContextParallel(2, 1)).tolist() == [2, 3, 4, 5, 7, 8]


def test_a_longer_stream_adds_padding_at_the_end_of_every_part() -> None:
    assert packed_token_index([3], ContextParallel(2, 0), stream_length=8).tolist() == [
        0,
        -1,
        -1,
        -1,
    ]


def test_contiguous_parts_follow_one_another() -> None:
    parts = [
        packed_token_index([3, 4], ContextParallel(2, rank, "contiguous")).tolist()
        for rank in range(2)
    ]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, -1]]


def test_rows_point_into_the_packed_local_stream() -> None:
    rows = packed_response_rows([13, 6], [5, 3], ContextParallel(2, 1))
    assert [piece.logit_rows.tolist() for piece in rows] == [[3, 4, 5, 6, 7], [8, 9, 10]]


def test_no_samples_give_no_rows() -> None:
    assert packed_response_rows([], [], ContextParallel(2, 1)) == []
    assert packed_responses([], [], ContextParallel(2, 1)).flat_indices.size == 0
    assert packed_token_index([], ContextParallel(2, 1)).size == 0


def test_given_stream_offsets_place_sequences() -> None:
    # 10 tokens at stream position 3 of 20, on 4 ranks: as in the single-sample test.
    cp = ContextParallel(4, 1, "contiguous")
    owned = packed_responses([10], [4], cp, stream_offsets=[3], stream_length=20)
    assert owned.response_indices.tolist() == [0, 1]
    assert owned.logit_rows.tolist() == [3, 4]


@pytest.mark.parametrize("multiple", [0, 6])
def test_a_padding_multiple_that_cannot_be_cut_is_refused(multiple: int) -> None:
    with pytest.raises(GeometryError, match="needs a positive multiple of 4"):
        padded_lengths([5], ContextParallel(2, 0), pad_multiple=multiple)


@pytest.mark.parametrize("length", [14, 17])
def test_a_stream_too_short_or_indivisible_is_refused(length: int) -> None:
    with pytest.raises(GeometryError, match="must be a multiple of 2 that is at least 16"):
        packed_token_index([13], ContextParallel(2, 0), stream_length=length)
    with pytest.raises(GeometryError, match="must be a multiple of 2 that is at least 16"):
        packed_responses([13], [5], ContextParallel(2, 0), stream_length=length)


def test_stream_offsets_belong_to_contiguous() -> None:
    with pytest.raises(GeometryError, match="belong to layout 'contiguous'"):
        packed_responses([4], [2], ContextParallel(2, 0), stream_offsets=[0])
    with pytest.raises(GeometryError, match="2 stream offsets for 1 samples"):
        packed_responses(
            [4], [2], ContextParallel(2, 0, "contiguous"), stream_offsets=[0, 4], stream_length=8
        )


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (
            [0, 3, 10],
            (
                "sample 1 starts at stream offset 3, but sample 0 takes the stream up to 4; samples"
                " of a stream must not overlap"
            ),
        ),
        ([0, 0, 10], "sample 1 starts at stream offset 0, but sample 0 takes the stream up to 4"),
        ([8, 4, 7], "sample 2 starts at stream offset 7, but sample 1 takes the stream up to 8"),
    ],
)
def test_samples_of_a_stream_must_not_overlap(offsets: list[int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        packed_responses(
            [4, 4, 4],
            [2, 2, 2],
            ContextParallel(2, 0, "contiguous"),
            stream_offsets=offsets,
            stream_length=16,
        )


def test_samples_of_a_stream_may_touch_and_lie_in_any_order() -> None:
    owned = [
        packed_responses(
            [4, 4, 4],
            [2, 2, 2],
            ContextParallel(2, rank, "contiguous"),
            stream_offsets=[4, 0, 12],
            stream_length=16,
        )
        for rank in range(2)
    ]
    assert [part.samples.tolist() for part in owned] == [[0, 0, 1, 1], [2, 2]]


def test_errors_name_the_sample() -> None:
    with pytest.raises(GeometryError, match="sample 1: prompt length is 0"):
        packed_responses([4, 2], [2, 2], ContextParallel(2, 0))


@pytest.mark.parametrize(
    ("totals", "responses", "message"),
    [
        ([4], [1, 1], "1 total lengths but 2 response lengths"),
        ([4.0], [1], "flat list of integers"),
    ],
)
def test_lists_that_are_not_lengths_are_refused(
    totals: list[Any], responses: list[int], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        packed_responses(totals, responses, ContextParallel())


def test_lengths_may_be_arrays() -> None:
    owned = packed_responses(
        np.array([4, 5], np.int32), np.array([2, 1], np.int32), ContextParallel()
    )
    assert owned.flat_indices.tolist() == [0, 1, 2]
    assert owned.counts.tolist() == [2, 1]
