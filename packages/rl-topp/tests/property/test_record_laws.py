"""Laws of the record and its wire form, on random sets."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_topp import NucleusSet, align_rows, from_sglang_meta, to_wire

VOCAB_SIZE = 12


@st.composite
def nucleus_sets(draw: st.DrawFn, max_tokens: int = 8) -> NucleusSet:
    status = draw(st.lists(st.integers(0, 3), max_size=max_tokens))
    smallest = {0: 1, 3: 0}
    rows = [
        draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=smallest[kind], unique=True))
        if kind in smallest
        else []
        for kind in status
    ]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return NucleusSet(
        ids=np.array([token for row in rows for token in row], np.int64),
        offsets=offsets,
        status=np.array(status, np.uint8),
        vocab_size=VOCAB_SIZE,
    )


@given(st.lists(nucleus_sets(), max_size=6))
def test_appending_one_by_one_is_concatenating(sets: list[NucleusSet]) -> None:
    chain = NucleusSet.empty(vocab_size=VOCAB_SIZE)
    seen = [chain]
    for piece in sets:
        chain = chain.append(piece)
        seen.append(chain)
    assert chain == NucleusSet.concat(sets, vocab_size=VOCAB_SIZE)
    for count, earlier in enumerate(seen):
        assert earlier == NucleusSet.concat(sets[:count], vocab_size=VOCAB_SIZE)


@given(nucleus_sets(), st.data())
def test_cutting_and_joining_gives_the_set_back(nucleus: NucleusSet, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(nucleus)))
    assert nucleus.slice(0, cut).append(nucleus.slice(cut, len(nucleus))) == nucleus
    assert nucleus.take(np.arange(len(nucleus))) == nucleus


@given(nucleus_sets(), st.data())
def test_taking_twice_is_taking_the_composition(nucleus: NucleusSet, data: st.DataObject) -> None:
    index = st.lists(st.integers(0, len(nucleus) - 1), min_size=1) if len(nucleus) else st.just([])
    first = data.draw(index)
    second = data.draw(st.lists(st.integers(0, len(first) - 1)) if first else st.just([]))
    assert nucleus.take(first).take(second) == nucleus.take(np.array(first, np.int64)[second])


@given(nucleus_sets())
def test_the_wire_loses_nothing(nucleus: NucleusSet) -> None:
    text = json.loads(json.dumps(to_wire(nucleus)))
    assert (
        from_sglang_meta(text, expected_num_tokens=len(nucleus), vocab_size=VOCAB_SIZE) == nucleus
    )


@given(
    st.lists(nucleus_sets(max_tokens=5), min_size=1, max_size=4), st.randoms(use_true_random=False)
)
def test_aligning_puts_every_token_where_it_was_asked(
    sets: list[NucleusSet], random: object
) -> None:
    total = sum(len(piece) for piece in sets)
    places = list(range(total + 3))
    random.shuffle(places)  # type: ignore[attr-defined]
    rows_of, start = [], 0
    for piece in sets:
        rows_of.append(places[start : start + len(piece)])
        start += len(piece)
    rows = align_rows(sets, [np.arange(len(piece)) for piece in sets], rows_of, num_rows=total + 3)
    for piece, where in zip(sets, rows_of, strict=True):
        assert rows.take(where) == piece
    assert (rows.take(places[start:]).status == 2).all()
