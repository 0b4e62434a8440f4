"""Context-parallel geometry on worked numbers, and what it refuses."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from rl_metrics import (
    ContextParallel,
    GeometryError,
    chunk_ranges,
    packed_responses,
    packed_token_index,
    padded_lengths,
    response_owner,
    response_slice,
)


def test_zigzag_ranges_of_13_tokens_on_2_ranks() -> None:
    # chunk = ceil(13 / 4) = 4
    assert chunk_ranges(13, ContextParallel(2, 0)) == ((0, 4), (12, 16))
    assert chunk_ranges(13, ContextParallel(2, 1)) == ((4, 8), (8, 12))


def test_a_wider_padding_makes_wider_chunks() -> None:
    assert chunk_ranges(13, ContextParallel(2, 1), padded_length=32) == ((8, 16), (16, 24))


def test_contiguous_ranges_are_clipped_to_the_sequence() -> None:
    # A stream of 20 tokens on 4 ranks has parts of 5; the sequence takes stream positions 3..12.
    ranges = [
        chunk_ranges(10, ContextParallel(4, rank, "contiguous"), stream_offset=3, stream_length=20)
        for rank in range(4)
    ]
    assert ranges == [((0, 2),), ((2, 7),), ((7, 10),), ((0, 0),)]


def test_response_logits_of_13_tokens_lie_on_rank_1() -> None:
    owned = response_slice(13, 5, ContextParallel(2, 1))
    assert owned.response_indices.tolist() == [0, 1, 2, 3, 4]
    assert owned.logit_rows.tolist() == [3, 4, 5, 6, 7]
    assert owned.response_indices.dtype == owned.logit_rows.dtype == np.int64
    assert len(response_slice(13, 5, ContextParallel(2, 0))) == 0


def test_contiguous_rows_count_from_the_start_of_the_part() -> None:
    # L = 10, R = 4: logits at sequence positions 5..8, stream positions 8..11; parts [5, 10) and
    # [10, 15).
    owned = [
        response_slice(
            10, 4, ContextParallel(4, rank, "contiguous"), stream_offset=3, stream_length=20
        )
        for rank in range(4)
    ]
    assert [piece.response_indices.tolist() for piece in owned] == [[], [0, 1], [2, 3], []]
    assert [piece.logit_rows.tolist() for piece in owned] == [[], [3, 4], [0, 1], []]


def test_contiguous_owner_uses_the_stream() -> None:
    assert response_owner(10, 4, 3, 4, layout="contiguous", stream_offset=3, stream_length=20) == (
        2,
        1,
    )


def test_one_rank_owns_everything() -> None:
    owned = response_slice(7, 3, ContextParallel())
    assert owned.response_indices.tolist() == [0, 1, 2]
    assert owned.logit_rows.tolist() == [3, 4, 5]


def test_an_empty_response_has_no_owner() -> None:
    assert len(response_slice(4, 0, ContextParallel(2, 1))) == 0
    with pytest.raises(GeometryError, match="response token 0 does not exist"):
        response_owner(4, 0, 0, 2)


@pytest.mark.parametrize("j", [-1, 5])
def test_a_token_outside_the_response_is_refused(j: int) -> None:
    with pytest.raises(GeometryError, match=r"j must lie in \[0, 5\)"):
        response_owner(13, 5, j, 2)


def test_an_empty_prompt_is_an_error_that_says_so() -> None:
    with pytest.raises(GeometryError, match=r"prompt length is 0.*at least one prompt token"):
        response_slice(5, 5, ContextParallel(2, 0))


@pytest.mark.parametrize(("total", "response"), [(4, 5), (4, -1), (0, 1)])
def test_lengths_that_do_not_fit_are_refused(total: int, response: int) -> None:
    with pytest.raises(GeometryError, match="need 0 <= response_length < total_length"):
        response_slice(total, response, ContextParallel())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "at least 1"),
        ({"size": 2, "rank": 2}, r"must lie in 0\.\.1"),
        ({"size": 2, "rank": -1}, "rank is -1; give an integer of at least 0"),
        ({"size": 2.5}, r"size is 2.5 \(float\); give an integer of at least 1"),
        ({"size": 2.0}, r"size is 2.0 \(float\)"),
        ({"size": "2"}, r"size is '2' \(str\)"),
        ({"size": True}, r"size is True \(bool\)"),
        ({"size": 2, "rank": 0.5}, r"rank is 0.5 \(float\)"),
        ({"size": 2, "rank": None}, "rank is None"),
        ({"size": 2, "layout": "ring"}, "use 'zigzag' or 'contiguous'"),
    ],
)
def test_an_impossible_place_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        ContextParallel(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs stream_length"),
        ({"stream_length": 15}, "must be a multiple of the context-parallel size 2"),
        ({"stream_length": 20.0}, r"stream_length is 20.0 \(float\)"),
        ({"stream_length": 20, "stream_offset": 1.5}, r"stream_offset is 1.5 \(float\)"),
        ({"stream_length": -2}, "stream_length is -2"),
        ({"stream_length": 10, "stream_offset": 4}, "do not fit into a stream of 10 tokens"),
        ({"stream_length": 20, "stream_offset": -1}, "do not fit into a stream"),
    ],
)
def test_contiguous_refuses_a_stream_that_cannot_hold_the_sequence(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        response_slice(10, 4, ContextParallel(2, 0, "contiguous"), **arguments)


@pytest.mark.parametrize("padded", [12, 18])
def test_zigzag_refuses_a_padding_it_cannot_cut(padded: int) -> None:
    with pytest.raises(GeometryError, match="needs a multiple of 4"):
        chunk_ranges(13, ContextParallel(2, 0), padded_length=padded)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ContextParallel().size = 2  # type: ignore[misc]


def test_a_place_keeps_python_integers() -> None:
    # As an 8-bit integer, twice 200 would be 144.
    cp = ContextParallel(cast("Any", np.uint8(200)), cast("Any", np.int32(3)))
    assert (type(cp.size), type(cp.rank)) == (int, int)
    assert chunk_ranges(400, cp)[0] == (3, 4)


NO_PLACE: Any = 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: chunk_ranges(cast("Any", 13.5), ContextParallel()),
            r"total_length is 13.5 \(float\)",
        ),
        (
            lambda: chunk_ranges(-1, ContextParallel(2, 0)),
            "total_length is -1; give an integer of at least 0",
        ),
        (
            lambda: chunk_ranges(13, ContextParallel(2, 0), padded_length=cast("Any", 16.0)),
            r"padded_length is 16.0 \(float\)",
        ),
        (
            lambda: response_slice(13, cast("Any", 4.5), ContextParallel()),
            r"response_length is 4.5 \(float\)",
        ),
        (lambda: response_owner(13, 5, cast("Any", 1.5), 2), r"j is 1.5 \(float\)"),
        (lambda: response_owner(13, 5, 0, 0), "context-parallel size is 0"),
        (lambda: response_owner(13, 5, 0, cast("Any", 2.5)), "context-parallel size is 2.5"),
        (
            lambda: response_owner(13, 5, 0, 2, layout=cast("Any", "ring")),
            "use 'zigzag' or 'contiguous'",
        ),
        (lambda: response_owner(5, 5, 0, 2), "prompt length is 0"),
        (lambda: response_owner(4, 6, 5, 2), "need 0 <= response_length < total_length"),
        (
            lambda: chunk_ranges(13, NO_PLACE),
            r"cp is 2 \(int\); give this rank's place, ContextParallel\(size, rank\)",
        ),
        (lambda: response_slice(13, 5, NO_PLACE), "cp is 2"),
        (lambda: ContextParallel(2, 0, cast("Any", np.ones(2))), "layout is array"),
        (lambda: chunk_ranges(10**20, ContextParallel()), "total_length is .*at most 2"),
        (lambda: response_owner(13, 5, 0, 10**20), "context-parallel size is .*at most 2"),
        (lambda: padded_lengths([13], NO_PLACE), "cp is 2"),
        (lambda: packed_token_index([13], NO_PLACE), "cp is 2"),
        (lambda: packed_responses([13], [5], NO_PLACE), "cp is 2"),
        (lambda: padded_lengths([3, -3], ContextParallel()), "sample 1: length -3"),
        (lambda: packed_token_index([-3], ContextParallel()), "sample 0: length -3"),
        (
            lambda: padded_lengths([3], ContextParallel(), pad_multiple=cast("Any", 4.0)),
            r"pad_multiple is 4.0 \(float\)",
        ),
        (
            lambda: packed_token_index([3], ContextParallel(), stream_length=cast("Any", 4.0)),
            r"stream_length is 4.0 \(float\)",
        ),
        (
            lambda: padded_lengths(cast("Any", [[1], [1, 2]]), ContextParallel()),
            "the list of lengths: cannot be read",
        ),
        (
            lambda: padded_lengths(cast("Any", "ab"), ContextParallel()),
            "the list of lengths: entries are of type",
        ),
    ],
)
def test_every_wrong_argument_is_a_geometry_error_that_names_it(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        call()
