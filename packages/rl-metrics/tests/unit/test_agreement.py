"""How a disagreement between ranks is told."""

import pytest

from rl_metrics.metric.agreement import RankReport, difference, disagreement


def _report(*metrics: str, failure: str | None = None, **settings: str) -> RankReport:
    return RankReport(failure=failure, settings=settings, metrics=metrics)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["a", "b"], ""),
        (["b", "a"], ""),
        (["a"], "lacks 'b'"),
        (["a", "b", "d", "c"], "adds 'c', 'd'"),
        (["c"], "lacks 'a', 'b' and adds 'c'"),
        ([], "lacks 'a', 'b'"),
    ],
)
def test_only_what_applies_is_said(given: list[str], told: str) -> None:
    assert difference(["a", "b"], given) == told


def test_ranks_that_differ_are_named_and_the_others_are_not() -> None:
    message = disagreement([_report("a (sum)"), _report("a (sum)"), _report("a (mean)"), _report()])
    assert (
        "rank 2 lacks 'a (sum)' and adds 'a (mean)' compared with rank 0; rank 3 lacks 'a (sum)'"
        " compared with rank 0." in message
    )
    assert "rank 1" not in message


def test_settings_are_told_with_every_ranks_value_before_metrics() -> None:
    message = disagreement(
        [
            _report("a", units="8.0", size="2"),
            _report("b", units="4.0", size="2"),
            _report("a", size="2"),
        ]
    )
    assert (
        message
        == "ranks of the group disagree: units is 8.0 on rank 0, 4.0 on rank 1, nothing on rank 2."
        " Pass the same values on every rank"
    )


def test_a_failed_rank_is_told_before_all_else() -> None:
    message = disagreement(
        [
            _report("a", units="8"),
            _report(failure="no data"),
            _report("b", units="4"),
            _report(failure="broke"),
        ]
    )
    assert (
        message
        == "rank 1 could not prepare its metrics: no data; rank 3 could not prepare its metrics:"
        " broke"
    )


def test_of_many_names_the_first_ten_are_told_and_the_rest_counted() -> None:
    told = difference([], [f"m{i:03}" for i in range(500)])
    assert told == "adds " + ", ".join(f"'m{i:03}'" for i in range(10)) + " and 490 more"
    assert difference([f"m{i}" for i in range(10)], []).endswith("'m9'")


def test_names_that_read_alike_are_told_in_ascii() -> None:
    assert (
        difference(["caf\u00e9", "na\u00efve"], ["cafe\u0301"])
        == "lacks 'caf\\xe9', 'na\u00efve' and adds 'cafe\\u0301'"
    )
