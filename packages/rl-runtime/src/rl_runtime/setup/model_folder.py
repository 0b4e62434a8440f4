"""Is a folder a model in Hugging Face layout?

Invariants: what passes here can be read by trainers and engines as far as that can be told without
loading it; every problem is one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rl_runtime.errors import RuntimeSetupError
from rl_runtime.megatron.shape import read_model_config

__all__ = ["folder_problems"]

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, 64 bits, little-endian."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder_problems(key: str, folder: Path) -> Iterator[str]:
    """List what is wrong with a model folder.

    Args:
        key: key of the recipe that names the folder, for the messages.
        folder: the folder.
    """
    if not folder.is_dir():
        yield (
            f"{key} = {folder}: no such folder: give a folder with config.json, *.safetensors and a"
            " tokenizer"
        )
        return
    try:
        read_model_config(folder)
    except RuntimeSetupError as error:
        yield f"{key} = {folder}: {error}"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield f"{key} = {folder}: has no *.safetensors file"
    for file in files:
        problem = _weights_problem(file)
        if problem is not None:
            yield f"{key} = {folder}: {file.name} {problem}: copy it again"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key} = {folder}: has no tokenizer ({', '.join(_TOKENIZER_FILES)})"


def _weights_problem(file: Path) -> str | None:
    """Compare a safetensors file's size with what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + header_bytes:
            return f"is cut short or not a safetensors file ({size} bytes)"
        try:
            header = json.loads(stream.read(header_bytes))
            end = max(
                int(entry["data_offsets"][1])
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "has no readable header"
    expected = _LENGTH_BYTES + header_bytes + end
    return None if size == expected else f"has {size} bytes, expected {expected}"
