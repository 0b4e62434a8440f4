"""Pages of dumps for tests, and what a page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from rl_dump import open_dump, write_html

from .dump_batches import Columns, batch, ragged


def page(folder: Path, train: Path, rollout: Path | None = None, **options: Any) -> Path:
    with open_dump(train) as dump:
        if rollout is None:
            return write_html(dump, folder / "page.html", **options)
        with open_dump(rollout) as texts:
            return write_html(dump, folder / "page.html", rollout=texts, **options)


def document_of(file: Path) -> dict[str, Any]:
    found = re.search(r'id="document">(.*?)</script>', file.read_text())
    assert found is not None
    loaded: dict[str, Any] = json.loads(found.group(1))
    return loaded


def awkward(count: int = 40) -> Columns:
    """Samples with NaN, infinity, numbers that are too large, and names the page uses itself."""
    columns = batch(count, seed=5)
    lengths = columns["response_lengths"]
    wrong = np.arange(count) % 4 == 1
    log_probs = [np.array(item) for item in columns["log_probs"]]
    for row in np.flatnonzero(wrong & (lengths > 0)):
        log_probs[row][-1] = np.nan
    tokens = [np.array(item, np.int64) for item in columns["tokens"]]
    tokens[0][-1], tokens[1][-1] = 2**40 + 1, 2**60 + 1
    return {
        **columns,
        "tokens": ragged(tokens, np.int64),
        "log_probs": ragged(log_probs, np.float32),
        "loss_masks": ragged([np.ones(length) for length in lengths], np.int32),
        "rewards": np.where(wrong, np.nan, np.arange(count) % 7 - 3.0),
        "sample_index": 2**63 - 1 - np.arange(count),
        "row": np.full(count, 5),
        "mean_advantage": np.arange(count),
        "huge": ragged([np.full(length, 1e300) for length in lengths], np.float64),
        "long": ragged([np.full(length, 2**40 + 3) for length in lengths], np.int64),
        "longest": ragged([np.full(length, 2**62 + 1) for length in lengths], np.int64),
    }
