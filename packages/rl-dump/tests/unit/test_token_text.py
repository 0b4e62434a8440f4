"""Token ids to bytes, for the kinds of tokenizers there are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rl_dump import DumpError
from rl_dump.tools.token_text import token_bytes


def tokens(folder: Path, **document: Any) -> Any:
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return token_bytes(folder)


def test_byte_level_characters_stand_for_bytes(tmp_path: Path) -> None:
    found = tokens(
        tmp_path,
        model={
            "type": "BPE",
            "vocab": {"Hi": 0, "\u0120you": 1, "\u010a": 2, "\u00c3": 3, "\u00a9": 4},
        },
        decoder={"type": "ByteLevel"},
        added_tokens=[{"id": 9, "content": "<|end|>"}],
    )
    assert found == {0: b"Hi", 1: b" you", 2: b"\n", 3: b"\xc3", 4: b"\xa9", 9: b"<|end|>"}


def test_a_metaspace_is_a_space_and_a_fallback_token_its_byte(tmp_path: Path) -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    found = tokens(
        tmp_path,
        model={"type": "Unigram", "vocab": [["\u2581the", -1.0], ["<0xE4>", 0]]},
        decoder=decoder,
    )
    assert found == {0: b" the", 1: b"\xe4"}


def test_a_word_piece_that_begins_a_word_has_a_space_and_a_word_level_token_none(
    tmp_path: Path,
) -> None:
    assert tokens(
        tmp_path,
        model={"type": "WordPiece", "vocab": {"play": 0, "##ing": 1}},
        decoder={"type": "WordPiece"},
    ) == {
        0: b" play",
        1: b"ing",
    }
    assert tokens(
        tmp_path, model={"type": "WordLevel", "vocab": {"a": 0, "\n": 1}}, decoder=None
    ) == {0: b"a", 1: b"\n"}


def test_every_byte_has_one_character(tmp_path: Path) -> None:
    from rl_dump.tools.token_text import _byte_characters

    assert sorted(_byte_characters().values()) == list(range(256))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": {"a": "x"}}}',
        '{"model": {"vocab": [1]}}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DumpError, match=r"tokenizer\.json: not a tokenizer\.json"):
        token_bytes(tmp_path / "tokenizer.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="cannot be opened"):
        token_bytes(tmp_path / "nope.json")


def test_a_pipe_is_not_a_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DumpError, match="no regular file"):
        token_bytes(tmp_path)
