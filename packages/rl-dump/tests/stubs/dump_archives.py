"""Archives as torch writes them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def train_file(path: Path, samples: list[dict[str, Any]], **top: Any) -> Path:
    torch.save(
        {
            "format_version": 2,
            "rollout_id": 3,
            "rank": 0,
            "samples": samples,
            "dp_shards": [],
            **top,
        },
        path / "x.pt",
    )
    return path / "x.pt"
