"""Which rank does what."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rl_dump import DumpError
from rl_dump.torch import DumpTopology


def test_one_process_does_everything() -> None:
    topology = DumpTopology(global_rank=0)
    assert topology.takes_part
    assert topology.is_shard_sender
    assert topology.is_writer


def test_of_all_ranks_exactly_one_writes_and_it_is_the_last_stages_first() -> None:
    found = []
    for pp, tp, cp in itertools.product(range(2), range(2), range(2)):
        topology = DumpTopology(
            global_rank=0, pp_rank=pp, pp_size=2, tp_rank=tp, tp_size=2, cp_rank=cp, cp_size=2
        )
        found.append(
            (pp, tp, cp, topology.takes_part, topology.is_shard_sender, topology.is_writer)
        )
    assert [place[:3] for place in found if place[3]] == [(1, 0, 0), (1, 0, 1)]
    assert [place[:3] for place in found if place[4]] == [(1, 0, 0)]
    assert [place[:3] for place in found if place[5]] == [(1, 0, 0)]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2 is not below dp_size 2"),
        ({"cp_rank": -1}, "cp_rank -1"),
        ({"dp_size": 2}, "shard_group must be a gloo group over the 2 shard senders"),
        ({"deadline_seconds": 0}, "deadline_seconds must be positive"),
    ],
)
def test_places_that_do_not_fit_are_refused(places: dict[str, Any], message: str) -> None:
    with pytest.raises(DumpError, match=message):
        DumpTopology(global_rank=0, **places)


def test_a_rank_that_sends_no_shard_needs_no_group() -> None:
    assert not DumpTopology(global_rank=1, dp_size=2, cp_rank=1, cp_size=2).is_shard_sender
