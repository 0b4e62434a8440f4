"""Laws of context-parallel geometry, exhaustively for up to 300 tokens and 8 ranks.

Checked against arithmetic that shares no code with it.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_metrics import (
    ContextParallel,
    Layout,
    chunk_ranges,
    packed_response_rows,
    packed_responses,
    packed_token_index,
    padded_lengths,
    response_owner,
    response_slice,
)

Ints = npt.NDArray[np.int64]
MAX_LENGTH = 300
RANKS = range(1, 9)
LAYOUTS: tuple[Layout, Layout] = ("zigzag", "contiguous")
SHAPES = [(length, response) for length in range(1, MAX_LENGTH + 1) for response in range(length)]


def zigzag_place(position: Ints, length: Ints, cp_size: int) -> tuple[Ints, Ints]:
    """Owner and row in the sample's local chunk, from the chunk a position falls into."""
    chunk = np.ceil(length / (2 * cp_size)).astype(np.int64)
    k = position // chunk
    back = k >= cp_size
    return np.where(back, 2 * cp_size - 1 - k, k), position - k * chunk + back * chunk


@pytest.mark.parametrize("cp_size", RANKS)
def test_zigzag_gives_every_response_token_of_every_shape_its_one_place(cp_size: int) -> None:
    totals, responses = (np.array(column, np.int64) for column in zip(*SHAPES, strict=True))
    sample = np.repeat(np.arange(totals.size), responses)
    j = np.concatenate([np.arange(response) for response in responses])
    owner, row = zigzag_place((totals - responses - 1)[sample] + j, totals[sample], cp_size)
    # Every sample starts in the local stream where the chunks of those before it end.
    local_start = 2 * np.cumsum(np.concatenate([[0], np.ceil(totals / (2 * cp_size))[:-1]])).astype(
        np.int64
    )
    for rank in range(cp_size):
        owned = packed_responses(totals, responses, ContextParallel(cp_size, rank))
        mine = owner == rank
        np.testing.assert_array_equal(owned.samples, sample[mine])
        np.testing.assert_array_equal(owned.response_indices, j[mine])
        np.testing.assert_array_equal(owned.logit_rows, row[mine] + local_start[sample[mine]])
        np.testing.assert_array_equal(owned.flat_indices, np.flatnonzero(mine))


@pytest.mark.parametrize("cp_size", RANKS)
def test_contiguous_gives_every_response_token_of_every_shape_its_one_place(cp_size: int) -> None:
    for length in range(1, MAX_LENGTH + 1):
        # One stream holds the length with every response length, so that starts fall everywhere in
        # the parts.
        totals, responses = np.full(length, length), np.arange(length)
        part = -(-(length * length) // cp_size)
        sample = np.repeat(np.arange(length), responses)
        j = np.concatenate([np.arange(response) for response in responses])
        place = sample * length + (length - responses - 1)[sample] + j
        for rank in range(cp_size):
            owned = packed_responses(
                totals, responses, ContextParallel(cp_size, rank, "contiguous")
            )
            mine = place // part == rank
            np.testing.assert_array_equal(owned.flat_indices, np.flatnonzero(mine))
            np.testing.assert_array_equal(owned.logit_rows, place[mine] % part)


@pytest.mark.parametrize("cp_size", RANKS)
def test_the_single_sample_functions_agree_with_the_packed_one(cp_size: int) -> None:
    rng = np.random.default_rng(cp_size)
    shapes = [(length, response) for length in range(1, 26) for response in range(length)]
    shapes += [SHAPES[i] for i in rng.integers(0, len(SHAPES), 150)]
    for length, response in shapes:
        owner, row = zigzag_place(
            length - response - 1 + np.arange(response), np.array(length), cp_size
        )
        for rank in range(cp_size):
            owned = response_slice(length, response, ContextParallel(cp_size, rank))
            np.testing.assert_array_equal(owned.response_indices, np.flatnonzero(owner == rank))
            np.testing.assert_array_equal(owned.logit_rows, row[owner == rank])
        for j in {0, response // 2, response - 1} & set(range(response)):
            expected = int(owner[j]), int(np.count_nonzero(owner[:j] == owner[j]))
            assert response_owner(length, response, j, cp_size) == expected


@pytest.mark.parametrize(("cp_size", "greatest"), [(2, 13), (4, 57), (8, 241), (16, 993)])
def test_the_last_response_token_may_lie_off_rank_0_up_to_the_known_length(
    cp_size: int, greatest: int
) -> None:
    elsewhere = [
        length
        for length in range(2, greatest + 80)
        if response_owner(length, 1, 0, cp_size)[0] != 0
    ]
    assert max(elsewhere) == greatest


Stream = tuple[list[int], list[int], int, Layout, int, int]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Lengths of a micro-batch, a group size, a layout, and a padding multiple that fits."""
    totals = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    responses = [draw(st.integers(0, total - 1)) for total in totals]
    cp_size = draw(st.integers(1, 5))
    layout: Layout = draw(st.sampled_from(LAYOUTS))
    base = 2 * cp_size if layout == "zigzag" else 1
    return (
        totals,
        responses,
        cp_size,
        layout,
        base * draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
    )


@given(streams())
def test_each_token_lies_once_in_the_local_streams_and_rows_address_the_token_before(
    stream: Stream,
) -> None:
    totals, responses, cp_size, layout, multiple, extra = stream
    first = np.cumsum([0, *totals])
    seen = []
    covered: list[list[int]] = [[] for _ in totals]
    for rank in range(cp_size):
        cp = ContextParallel(cp_size, rank, layout)
        used = int(padded_lengths(totals, cp, pad_multiple=multiple).sum())
        length = (-(-used // cp_size) + extra) * cp_size
        index = packed_token_index(totals, cp, pad_multiple=multiple, stream_length=length)
        assert index.size == length // cp_size
        seen += index[index >= 0].tolist()
        for i, owned in enumerate(
            packed_response_rows(totals, responses, cp, pad_multiple=multiple, stream_length=length)
        ):
            token_before = first[i] + totals[i] - responses[i] + owned.response_indices - 1
            np.testing.assert_array_equal(index[owned.logit_rows], token_before)
            assert len(owned) == owned.logit_rows.size
            covered[i] += owned.response_indices.tolist()
    assert sorted(seen) == list(range(sum(totals)))
    assert [sorted(indices) for indices in covered] == [
        list(range(response)) for response in responses
    ]


@given(streams())
def test_the_ranges_of_all_ranks_cover_every_token_once(stream: Stream) -> None:
    totals, _, cp_size, layout, _, _ = stream
    length = -(-sum(totals) // cp_size) * cp_size
    for total, offset in zip(totals, np.cumsum([0, *totals[:-1]]), strict=True):
        tokens = []
        for rank in range(cp_size):
            cp = ContextParallel(cp_size, rank, layout)
            for start, stop in chunk_ranges(
                total, cp, stream_offset=int(offset), stream_length=length
            ):
                tokens += [token for token in range(start, stop) if token < total]
        assert sorted(tokens) == list(range(total))
