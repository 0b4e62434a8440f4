"""Which text a token id stands for, from a `tokenizer.json` alone.

Enough of the format to show tokens to people: byte-level BPE, SentencePiece-like vocabularies
with and without byte fallback, WordPiece and word-level. Encoding text is not needed here.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rl_dump.errors import DumpError

__all__ = ["token_bytes"]

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def token_bytes(path: str | os.PathLike[str]) -> dict[int, bytes]:
    """Return the bytes of every token id.

    A token may hold part of a character, so bytes and not text.

    Args:
        path: a `tokenizer.json`, or a folder that holds one.

    Raises:
        DumpError: there is no such file, or it is not one.
    """
    target = Path(path)
    target = target / "tokenizer.json" if target.is_dir() else target
    if target.exists() and not target.is_file():
        raise DumpError(f"{target}: no regular file; give a tokenizer.json or its folder")
    try:
        document = json.loads(target.read_text(encoding="utf-8"))
        vocabulary = _vocabulary(document["model"])
        decode = _decoder(document)
        found = {number: decode(token) for token, number in vocabulary.items()}
        found |= {
            int(entry["id"]): str(entry["content"]).encode()
            for entry in document.get("added_tokens") or []
        }
    except OSError as error:
        raise DumpError(f"{target}: cannot be opened: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DumpError(
            f"{target}: not a tokenizer.json ({type(error).__name__}: {error})"
        ) from error
    return found


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return {str(token): int(number) for token, number in vocabulary.items()}


def _decoder(document: dict[str, Any]) -> Any:
    kinds = _kinds(document.get("decoder")) | _kinds(document.get("pre_tokenizer"))
    if "ByteLevel" in kinds:
        table = _byte_characters()
        return lambda token: b"".join(
            bytes([table[char]]) if char in table else char.encode() for char in token
        )
    if "WordPiece" in kinds or document["model"].get("type") == "WordPiece":
        prefix = document["model"].get("continuing_subword_prefix") or "##"
        return lambda token: (
            token[len(prefix) :].encode() if token.startswith(prefix) else f" {token}".encode()
        )
    if "Metaspace" in kinds or "Replace" in kinds or document["model"].get("byte_fallback"):
        return _from_metaspace
    return lambda token: token.encode()


def _kinds(part: Any) -> set[str]:
    if not isinstance(part, dict):
        return set()
    inner = [*(part.get("decoders") or []), *(part.get("pretokenizers") or [])]
    return {str(part.get("type"))}.union(*(_kinds(entry) for entry in inner))


def _from_metaspace(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match.group(1), 16)]) if match else token.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable bytes stand for themselves, the others are written from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + offset): byte for offset, byte in enumerate(rest)}
