"""Templates that lose data are refused before the first batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_dump import DumpError, check_templates, resolve_template


def test_both_names_of_the_batch_counter_are_filled_in() -> None:
    assert resolve_template("d/train_{batch_id}.parquet", batch_id=7) == Path("d/train_7.parquet")
    assert resolve_template("{rollout_id:05d}.pt", batch_id=7) == Path("00007.pt")
    assert resolve_template("{batch_id}.pt", batch_id="eval_3") == Path("eval_3.pt")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("train.parquet", r"has no \{batch_id\}: every batch would overwrite"),
        ("{rank}.parquet", r"unknown placeholder \{rank\}"),
        ("{batch_id}_{rank}.parquet", r"unknown placeholder \{rank\}"),
        ("{}.parquet", r"unknown placeholder \{\}"),
        ("{batch_id", "not a format string"),
        ("{batch_id}.json", "must end in .parquet or .pt"),
    ],
)
def test_templates_that_cannot_be_resolved_are_refused(template: str, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        resolve_template(template, batch_id=0)
    with pytest.raises(DumpError, match=message):
        check_templates(rollout=template, train=None)


@pytest.mark.parametrize("batch_id", ["", ".", "..", "a/b", "..\\x"])
def test_batch_ids_that_leave_the_folder_are_refused(batch_id: str) -> None:
    with pytest.raises(DumpError, match="cannot be part of a file name"):
        resolve_template("{batch_id}.pt", batch_id=batch_id)


def test_a_word_under_a_numeric_format_is_refused() -> None:
    with pytest.raises(DumpError, match="does not take batch_id 'eval'"):
        resolve_template("{batch_id:03d}.pt", batch_id="eval")


@pytest.mark.parametrize(
    ("rollout", "train"),
    [
        ("d/{batch_id}.pt", "d/{batch_id}.pt"),
        ("d/{batch_id}.pt", "d/{rollout_id}.pt"),
        ("d/{batch_id}.pt", "d/../d/./{batch_id}.pt"),
    ],
)
def test_equal_paths_for_both_dumps_are_refused_however_written(rollout: str, train: str) -> None:
    with pytest.raises(DumpError, match="both write to"):
        check_templates(rollout=rollout, train=train)


def test_links_to_one_folder_are_the_same_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DumpError, match="both write to"):
        check_templates(
            rollout=tmp_path / "real" / "{batch_id}.pt", train=tmp_path / "link" / "{batch_id}.pt"
        )


@pytest.mark.parametrize(
    "template",
    [
        "{batch_id!s:.0}.pt",
        "{batch_id!r}.pt",
        "{batch_id:.1}.pt",
        "{batch_id:.0e}.pt",
        "{batch_id:{batch_id}d}.pt",
    ],
)
def test_formats_that_can_give_two_batches_one_path_are_refused(template: str) -> None:
    with pytest.raises(DumpError, match="only a width is allowed"):
        check_templates(rollout=template, train=None)


@pytest.mark.parametrize(
    ("rollout", "train"),
    [
        ("d/{batch_id}.pt", "d/1{batch_id}.pt"),
        ("d/{batch_id:03d}.pt", "d/{batch_id}.pt"),
        ("d/{batch_id}.pt", "d/eval_{batch_id}.pt"),
    ],
)
def test_a_path_that_two_different_batches_share_is_refused(rollout: str, train: str) -> None:
    with pytest.raises(DumpError, match="both write to"):
        check_templates(rollout=rollout, train=train)


def test_two_batches_of_one_template_with_one_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "10").symlink_to(tmp_path / "11")
    with pytest.raises(DumpError, match="gives batches 10 and 11 the same path"):
        check_templates(rollout=tmp_path / "{batch_id}" / "x.pt", train=None)


def test_good_templates_pass() -> None:
    check_templates(rollout="r_{batch_id}.parquet", train="t_{batch_id}.parquet")
    check_templates(rollout="r_{batch_id:06d}.parquet", train="t_{batch_id:3}.parquet")
    check_templates(rollout=None, train=None)
