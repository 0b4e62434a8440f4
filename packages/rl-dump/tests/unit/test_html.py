"""The page: self-contained, safe, complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from stubs.dump_batches import (
    Pair,
    batch,
    rollout_columns,
    write_tokenizer,
)
from stubs.dump_pages import awkward, document_of, page

from rl_dump import write_dump


def test_the_page_refers_to_nothing_outside(tmp_path: Path, pair: Pair) -> None:
    text = page(tmp_path, pair[1], pair[0], tokenizer=write_tokenizer(tmp_path)).read_text()
    assert "default-src 'none'" in text
    assert not re.findall(
        r"""(?:src|href)\s*=|url\(|@import|https?://""",
        text.split('<script type="application/json"')[0],
    )


def test_text_of_a_dump_never_becomes_markup(tmp_path: Path) -> None:
    columns = rollout_columns(batch(3))
    columns["response"] = [
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror=alert(1)>",
        "]]>&amp;",
    ]
    columns["prompt"] = ["<!-- <script>"] * 3
    path = write_dump(
        tmp_path / "r.parquet", contract="rollout-dump.v1", batch_id=0, columns=columns
    )
    text = page(tmp_path, path).read_text()
    assert text.count("<script") == 3
    assert text.count("</script") == 3


def test_samples_beyond_the_size_are_listed_without_tokens(tmp_path: Path, pair: Pair) -> None:
    text = page(tmp_path, pair[1], max_token_bytes=2000).read_text()
    found = re.search(r'id="document">(.*?)</script>', text)
    assert found is not None
    document = json.loads(found.group(1))
    assert document["samples"] == len(document["facts"]["row"]) == 24
    kept = [row for row, span in enumerate(document["spans"]) if span]
    assert 0 < len(kept) < 24
    gaps = document["facts"]["max_log_prob_gap"]
    assert min(gaps[row] or 0 for row in kept) >= max(
        gap or 0 for row, gap in enumerate(gaps) if row not in kept
    )


def test_an_empty_dump_and_non_finite_values_make_a_page(tmp_path: Path) -> None:
    path = write_dump(
        tmp_path / "e.parquet", contract="train-dump.v2", batch_id=0, columns=batch(0)
    )
    document = document_of(page(tmp_path, path))
    assert document["samples"] == len(document["spans"]) == 0
    columns = {**batch(3), "rewards": np.array([np.nan, np.inf, 0.0])}
    path = write_dump(tmp_path / "n.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    document = document_of(page(tmp_path, path))
    assert document["samples"] == len(document["spans"]) == 3
    assert document["facts"]["rewards"] == ["nan", "inf", 0.0]


def test_samples_whose_gap_is_not_a_number_are_the_last_to_lose_their_tokens(
    tmp_path: Path,
) -> None:
    path = write_dump(
        tmp_path / "t.parquet", contract="train-dump.v2", batch_id=0, columns=awkward()
    )
    document = document_of(page(tmp_path, path, max_token_bytes=20_000))
    gaps = document["facts"]["max_log_prob_gap"]
    kept = {row for row, span in enumerate(document["spans"]) if span}
    assert {row for row, gap in enumerate(gaps) if gap == "nan"} <= kept
    assert len(kept) < len(gaps)
    others = [row for row in range(len(gaps)) if gaps[row] != "nan"]
    assert min(gaps[row] or 0 for row in kept & {*others}) >= max(
        gaps[row] or 0 for row in others if row not in kept
    )
