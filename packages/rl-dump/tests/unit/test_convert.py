"""Conversion: what has no container is refused before anything is written."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from stubs.dump_batches import Pair

from rl_dump import DumpError, convert, open_dump
from rl_dump.tools.convert import write_columns


def test_a_target_without_a_container_is_refused(tmp_path: Path, pair: Pair) -> None:
    with pytest.raises(
        DumpError, match=r"x\.json: cannot tell the container from the suffix '\.json'"
    ):
        convert(pair[1], tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_samples_without_fields_are_refused(tmp_path: Path, pair: Pair) -> None:
    with (
        open_dump(pair[1]) as dump,
        pytest.raises(DumpError, match="24 samples without a single field cannot be written"),
    ):
        write_columns(tmp_path / "x.parquet", dump.header, {})


def test_without_torch_an_archive_is_refused_with_what_to_do(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("rl_dump.torch"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(
        DumpError,
        match=(
            r"needs torch, which is not installed; `pip install 'rl-dump\[torch\]'`, or write"
            r" \.parquet"
        ),
    ):
        convert(pair[1], tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
