"""`NucleusSet`: what it refuses, and that nothing changes an existing set."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, NucleusStatus
from rl_topp.append_buffer import GrowingArray


def _nucleus(*, ids: Any, offsets: Any, status: Any, vocab_size: int) -> NucleusSet:
    """Lists stand for arrays here: the record converts what it is given."""
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


@pytest.fixture
def mixed() -> NucleusSet:
    return _nucleus(
        ids=[5, 9, 7, 1, 2, 3], offsets=[0, 2, 2, 3, 3, 6], status=[0, 2, 0, 1, 3], vocab_size=10
    )


@pytest.mark.parametrize(
    ("ids", "offsets", "status", "words"),
    [
        ([], [], [], ["offsets are empty", "1"]),
        ([1], [1], [], ["first offset must be 0", "got 1"]),
        ([1, 2], [0, 2, 1], [0, 0], ["token 1", "from 2 to 1"]),
        ([1, 2], [0, 1], [0], ["last offset is 1", "number of ids, 2"]),
        ([1], [0, 1], [0, 0], ["2 offsets", "expected 3"]),
        ([10], [0, 1], [0], ["token 0", "id 10", "[0, 10)"]),
        ([1, -1], [0, 1, 2], [0, 0], ["token 1", "id -1"]),
        ([4, 1, 4], [0, 0, 3], [1, 0], ["token 1", "id 4", "more than once"]),
        ([1], [0, 1], [4], ["token 0", "status 4"]),
        ([], [0, 0], [0], ["token 0", "no ids"]),
        ([1], [0, 1], [1], ["token 0", "status 1", "1 ids"]),
        ([1], [0, 1], [2], ["token 0", "status 2"]),
        ([1.5], [0, 1], [0], ["ids", "integers", "float64"]),
        ([[1]], [0, 1], [0], ["ids", "one dimension"]),
        ([2**40], [0, 1], [0], ["ids[0]", "int32"]),
        ([1], [0, 1], [-1], ["status[0]", "uint8"]),
        ([1, 2, 3], [0, 2**63 - 1, -2, 3], [0, 0, 0], ["token 1", "to -2"]),
        ([1, 2, 3], [0, 2**62, 3], [0, 0], ["token 1", "decrease"]),
        ([1, [2, 3]], [0, 2], [0], ["ids", "flat list"]),
        ([1], [0, True], [0.0], ["status", "integers"]),
    ],
)
def test_a_malformed_set_is_refused_by_token(
    ids: list[int], offsets: list[int], status: list[int], words: list[str]
) -> None:
    with pytest.raises(NucleusError) as caught:
        _nucleus(ids=ids, offsets=offsets, status=status, vocab_size=10)
    for word in words:
        assert word in str(caught.value)


def test_several_problems_come_in_one_error() -> None:
    with pytest.raises(NucleusError) as caught:
        _nucleus(ids=[3, 3, 99], offsets=[0, 2, 3, 3], status=[0, 7, 0], vocab_size=10)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("vocab_size", [0, -1, 5.5, "10", None, True])
def test_a_vocabulary_has_a_whole_number_of_ids(vocab_size: Any) -> None:
    with pytest.raises(NucleusError, match="vocab_size"):
        NucleusSet.empty(vocab_size=vocab_size)


@pytest.mark.parametrize("num_tokens", [-1, 2.0, None])
def test_a_number_of_tokens_that_is_not_a_count_is_refused(num_tokens: Any) -> None:
    with pytest.raises(NucleusError, match=f"num_tokens.*{num_tokens}"):
        NucleusSet.unfiltered(num_tokens, vocab_size=4)


def test_arrays_are_read_only_and_the_caller_keeps_its_own(mixed: NucleusSet) -> None:
    with pytest.raises(ValueError, match="read-only"):
        mixed.ids[0] = 1
    ids, offsets, status = np.array([1, 2], np.int32), np.array([0, 2]), np.array([0], np.uint8)
    nucleus = _nucleus(ids=ids, offsets=offsets, status=status, vocab_size=4)
    read_only = ids.view()
    read_only.flags.writeable = False  # its owner can still write
    viewed = _nucleus(ids=read_only, offsets=offsets, status=status, vocab_size=4)
    ids[0], offsets[1], status[0] = 99, 0, 3
    for taken in (nucleus, viewed):
        assert taken == _nucleus(ids=[1, 2], offsets=[0, 2], status=[0], vocab_size=4)


def test_dtypes_are_the_contract_s(mixed: NucleusSet) -> None:
    assert [array.dtype for array in (mixed.ids, mixed.offsets, mixed.status)] == [
        np.dtype(np.int32),
        np.dtype(np.int64),
        np.dtype(np.uint8),
    ]


def test_append_leaves_both_operands_and_forks_alone(mixed: NucleusSet) -> None:
    one = NucleusSet.from_lists([[1]], vocab_size=10)
    two = NucleusSet.from_lists([[2, 3]], vocab_size=10)
    base = mixed.append(one)
    left, right = base.append(two), base.append(one)
    again = left.append(one)
    assert base == NucleusSet.concat([mixed, one])
    assert left == NucleusSet.concat([mixed, one, two])
    assert right == NucleusSet.concat([mixed, one, one])
    assert again == NucleusSet.concat([mixed, one, two, one])


def test_threads_that_append_to_one_set_get_a_set_each() -> None:
    pieces = [NucleusSet.from_lists([[k]] * 3, vocab_size=100) for k in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(150):
            base = NucleusSet.empty(vocab_size=100).append(
                NucleusSet.from_lists([[50, 51]] * 10, vocab_size=100)
            )
            together = threading.Barrier(len(pieces))

            def branch(
                piece: NucleusSet, base: NucleusSet = base, together: threading.Barrier = together
            ) -> NucleusSet:
                together.wait(timeout=30)
                return base.append(piece)

            with ThreadPoolExecutor(len(pieces)) as pool:
                branches = list(pool.map(branch, pieces))
            assert branches == [NucleusSet.concat([base, piece]) for piece in pieces]
    finally:
        sys.setswitchinterval(interval)


def test_a_set_whose_chain_another_thread_is_growing_is_copied() -> None:
    """So nobody waits, and a process forked at such a moment does not hang."""
    one = NucleusSet.from_lists([[1]], vocab_size=10)
    chain = one.append(one)
    assert chain._growing is not None
    with chain._growing._lock:
        assert chain.append(one) == NucleusSet.concat([one, one, one])


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_append_that_runs_out_of_memory_changes_nothing(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (NucleusSet.from_lists([[k, k + 1]], vocab_size=10) for k in (1, 5))
    chain = one.append(one)
    calls = iter(range(1, 4))
    write = GrowingArray.write

    def fail(self: GrowingArray, size: int, values: np.ndarray[Any, Any]) -> None:
        if next(calls) == failing:
            raise MemoryError
        write(self, size, values)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GrowingArray, "write", fail)
        chain.append(one)
    assert chain.append(two) == NucleusSet.concat([one, one, two])


def test_append_and_concat_refuse_another_vocabulary(mixed: NucleusSet) -> None:
    other = NucleusSet.empty(vocab_size=11)
    with pytest.raises(NucleusError, match=r"11.*10"):
        mixed.append(other)
    with pytest.raises(NucleusError, match="set 1"):
        NucleusSet.concat([mixed, other])
    with pytest.raises(NucleusError, match="vocab_size"):
        NucleusSet.concat([])
    assert len(NucleusSet.concat([], vocab_size=10)) == 0


def test_slice_take_and_indexing_give_the_tokens_asked_for(mixed: NucleusSet) -> None:
    part = mixed.slice(1, 4)
    assert part.status.tolist() == [2, 0, 1]
    assert part.offsets.tolist() == [0, 0, 1, 1]
    assert part.ids.base is not None
    taken = mixed.take([4, 0, 0])
    assert [ids.tolist() for ids in taken] == [[1, 2, 3], [5, 9], [5, 9]]
    assert taken.status.tolist() == [3, 0, 0]
    assert mixed[-1].tolist() == [1, 2, 3]
    assert len(mixed.take([])) == 0
    with pytest.raises(IndexError):
        mixed[5]
    with pytest.raises(NucleusError, match=r"tokens\[1\] is 5"):
        mixed.take([0, 5])
    with pytest.raises(NucleusError, match="slice"):
        mixed.slice(3, 2)


def test_sets_that_differ_in_the_order_of_their_ids_are_other_records() -> None:
    a, b = (NucleusSet.from_lists([ids, [4]], vocab_size=5) for ids in ([3, 1, 2], [2, 3, 1]))
    assert a != b
    assert a == NucleusSet.from_lists([[3, 1, 2], [4]], vocab_size=5)
    assert a != object()


def test_targets_are_checked_against_complete_sets_only(mixed: NucleusSet) -> None:
    mixed.check_targets([9, -100, 7, 0, 8])
    for targets, words in (
        ([1, 0, 7, 0, 0], "token 0 sampled id 1"),
        ([9, 0, 7, 10, 0], "token 3 sampled id 10"),
        ([9], "1 targets for 5"),
    ):
        with pytest.raises(NucleusError, match=words):
            mixed.check_targets(targets)


def test_scored_mask_follows_the_rule_for_truncated_sets(mixed: NucleusSet) -> None:
    assert mixed.scored_mask().tolist() == [True, False, True, True, False]
    assert mixed.scored_mask(on_truncated="full").tolist() == [True, False, True, True, True]
    with pytest.raises(NucleusError, match="'Full'"):
        mixed.scored_mask(on_truncated=cast(Any, "Full"))


def test_a_set_survives_pickling(mixed: NucleusSet) -> None:
    grown = mixed.append(mixed)
    assert pickle.loads(pickle.dumps(grown)) == grown
    assert len(pickle.dumps(grown.slice(0, 1))) < len(pickle.dumps(grown)) + 1


def test_from_lists_names_the_token() -> None:
    nucleus = NucleusSet.from_lists([[5, 9], None], vocab_size=10)
    assert nucleus.status.tolist() == [NucleusStatus.KEPT, NucleusStatus.NO_FILTER]
    with pytest.raises(NucleusError, match="token 1"):
        NucleusSet.from_lists([[1], []], vocab_size=10)
    with pytest.raises(NucleusError, match="kept ids of token 1"):
        NucleusSet.from_lists([[1], [0.5]], vocab_size=10)  # type: ignore[list-item]
