"""The choice between dot products and blocks follows the expected cost."""

import numpy as np
import pytest

pytest.importorskip("torch")
from rl_topp.lm_head.cost import COSTS, DeviceCost, choose_blocked


def _choose(
    sizes: list[int],
    *,
    device_type: str = "cuda",
    anyway: bool = False,
    num_local_ids: int = 100_000,
) -> list[bool]:
    chosen = choose_blocked(
        np.array(sizes),
        num_local_ids=num_local_ids,
        width=1024,
        device_type=device_type,
        blocks_run_anyway=anyway,
    )
    return [bool(choice) for choice in chosen]


@pytest.mark.parametrize("device_type", COSTS)
def test_small_sets_are_scored_one_by_one_and_whole_vocabularies_in_blocks(
    device_type: str,
) -> None:
    assert _choose([1] * 1000, device_type=device_type) == [False] * 1000
    assert _choose([100_000] * 1000, device_type=device_type) == [True] * 1000


def test_the_switch_lies_where_entries_cost_as_much_as_the_row_s_products() -> None:
    cost = COSTS["cuda"]
    per_entry = cost.entry_seconds * 1024 - cost.block_entry_seconds
    even = 100_000 * cost.product_seconds * 1024 / per_entry
    assert _choose([int(even) - 1, int(even) + 1], anyway=True) == [False, True]


def test_a_few_large_sets_do_not_pay_for_reading_the_weight() -> None:
    assert _choose([2000] + [1] * 100) == [False] * 101
    assert _choose([2000] + [1] * 100, anyway=True) == [True] + [False] * 100


def test_the_break_even_size_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 * 0.5 * 10 per row, 2 * 10 - 10 per entry: even at 50; at width 5 blocks save nothing."""
    cost = DeviceCost(
        entry_seconds=2.0, product_seconds=0.5, pass_seconds=0.0, block_entry_seconds=10.0
    )
    monkeypatch.setitem(COSTS, "cpu", cost)
    for width, expected in ((10, [False, False, True]), (5, [False] * 3)):
        chosen = choose_blocked(
            np.array([49, 50, 51]),
            num_local_ids=100,
            width=width,
            device_type="cpu",
            blocks_run_anyway=False,
        )
        assert chosen.tolist() == expected


def test_no_rows_choose_nothing() -> None:
    assert _choose([]) == []
