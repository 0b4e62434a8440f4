"""What the page of a dump holds: every sample's facts, and as many samples' tokens as fit.

One file without references: it can be attached to an issue. Looks and behaviour are in `page/`.

Invariants, matched by tests in `test_html.py` and `test_page_in_browser.py`, `tests/unit/`:

- the page refers to nothing outside of itself, and text of a dump can never become markup;
- the list holds every sample; a sample whose tokens were left out says so;
- a number is shown as the dump holds it, or marked as rounded: whole numbers beyond 2**53, NaN and
  infinity go as words where JSON lacks them.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_dump.atomic import atomic_path, refuse_input
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import ROLLOUT_DUMP
from rl_dump.errors import DumpError
from rl_dump.reader import Dump
from rl_dump.tools.doctor import doctor
from rl_dump.tools.join import join
from rl_dump.tools.plain_json import plain_json
from rl_dump.tools.summary import summary
from rl_dump.tools.token_statistics import (
    log_prob_gap,
    mean_of,
    nucleus_sizes,
    ragged_field,
    sample_values,
    scalar_field,
    trained_tokens,
)
from rl_dump.tools.token_text import token_bytes

__all__ = ["MAX_TOKEN_BYTES", "write_html"]

MAX_TOKEN_BYTES = 48 << 20
"""Size of the tokens' part of a page, after packing: what a browser opens in a second or two."""

_SCRIPTS = ("data.js", "table.js", "detail.js", "layout.js", "main.js")
_EXACT = 2**53
"""Whole numbers up to here are exact as JavaScript's numbers."""
_DERIVED = (
    "row",
    "trained_fraction",
    "mean_log_prob_gap",
    "max_log_prob_gap",
    "mean_advantage",
    "mean_kept_set",
    "log_prob_gap",
    "kept_set_size",
)
"""Names the page gives to what it adds; a field of such a name gets `_field` behind it."""
_SUMMARY = ("name", "count", "minimum", "mean", "maximum", "num_non_finite", "num_missing")
_SHARD = ("rank", "data_parallel_rank", "num_microbatches", "global_batch_sizes")
_TEXT_FIELDS = ("prompt", "response", "label")


def write_html(
    dump: Dump,
    target: str | os.PathLike[str],
    *,
    rollout: Dump | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_token_bytes: int = MAX_TOKEN_BYTES,
) -> Path:
    """Write a dump as one self-contained page.

    Args:
        dump: a train or rollout dump.
        target: the file to write; must end in `.html` or `.htm`.
        rollout: the rollout dump of the same batch, for prompt and response texts.
        tokenizer: a `tokenizer.json` or its folder, for the text of every token.
        max_token_bytes: size of the tokens' part; samples beyond it are in the list without their
            tokens, those with the largest log-prob gap (else the first) last to be left out.

    Returns:
        The path written.

    Raises:
        DumpError: a dump or the tokenizer cannot be read, or the target does not end in `.html` or
            `.htm`.
        WriteError: the file system refused.
    """
    final = Path(target)
    if final.suffix.lower() not in {".html", ".htm"}:
        raise DumpError(
            f"{final}: a page must end in .html or .htm; a rollout dump whose texts the page shall"
            " show goes to --rollout"
        )
    refuse_input(final, dump.path, None if rollout is None else rollout.path, tokenizer)
    facts = _facts(dump)
    strips = _strips(dump)
    blobs, spans = _token_blobs(dump, strips, _priority(dump, facts), max_token_bytes)
    document = {
        "file": dump.path.name,
        "contract": dump.contract,
        "batch": dump.batch_id,
        "producer": dump.header["producer"],
        "samples": dump.num_samples,
        "facts": facts,
        "numbers": _numbers(facts),
        "ids": _ids_dtype(dump).str.lstrip("<"),
        "strips": [
            {"name": name, "dtype": strip.dtype.str.lstrip("<|"), **_range(strip, dump)}
            for name, strip in strips.items()
        ],
        "spans": spans,
        "texts": _texts(dump, rollout),
        "vocabulary": _vocabulary(dump, tokenizer),
        "alarms": doctor(dump),
        "summary": [[getattr(entry, key) for key in _SUMMARY] for entry in summary(dump).fields],
        "shards": [{key: shard.get(key) for key in _SHARD} for shard in dump.dp_shards],
        "dropped": dump.dropped,
    }
    with atomic_path(final) as temporary:
        temporary.write_text(_fill(document, blobs), encoding="utf-8")
    return final


def _fill(document: Mapping[str, Any], blobs: str) -> str:
    folder = files("rl_dump.tools") / "page"
    parts = {
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        # A "<" inside a script element could end it.
        "document": (
            json.dumps(
                plain_json(document, largest=_EXACT),
                ensure_ascii=True,
                allow_nan=False,
                separators=(",", ":"),
            ).replace("<", "\\u003c")
        ),
        "tokens": blobs,
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    head, *rest = page.split("@@")
    return head + "".join(
        parts[piece] if index % 2 == 0 else piece for index, piece in enumerate(rest)
    )


def _facts(dump: Dump) -> dict[str, list[Any]]:
    """Return one value per sample and fact, in the order of the list's columns."""
    facts: dict[str, list[Any]] = {
        "row": list(range(dump.num_samples)),
        "rollout_position": dump.positions().tolist(),
    }
    for name, field in dump.fields.items():
        if name in _TEXT_FIELDS or field.kind not in {"scalar", "text"}:
            continue
        facts[_page_name(name, dump)] = sample_values(dump, name)
    if dump.raw_reward is not None and "raw_reward" not in facts and dump.num_samples:
        whole = dump.raw_reward
        facts["raw_reward"] = [
            whole[position] if position < len(whole) else None
            for position in facts["rollout_position"]
        ]
    for name, source, reduce in (
        ("trained_fraction", ragged_field(dump, "loss_masks"), lambda mask: (mask != 0).mean()),
        ("mean_log_prob_gap", log_prob_gap(dump), mean_of),
        ("max_log_prob_gap", log_prob_gap(dump), np.max),
        ("mean_advantage", ragged_field(dump, "advantages"), mean_of),
        ("mean_kept_set", nucleus_sizes(dump), mean_of),
    ):
        if source is not None:
            facts[name] = [float(reduce(item)) if len(item) else None for item in source]
    return facts


def _page_name(name: str, dump: Dump) -> str:
    shown = name
    while shown in _DERIVED or (shown != name and shown in dump.fields):
        shown += "_field"
    return shown


def _numbers(facts: Mapping[str, list[Any]]) -> list[str]:
    return [
        name
        for name, values in facts.items()
        if (kinds := {type(value) for value in values if value is not None})
        and kinds <= {int, float}
    ]


def _strips(dump: Dump) -> dict[str, RaggedArray]:
    """Return what can colour a token: fields with one number per response token, and statistics."""
    lengths = scalar_field(dump, "response_lengths")
    fields = [name for name in ("advantages", "loss_masks") if name in dump.fields]
    fields += [name for name in dump.fields if name not in {*fields, "tokens"}]
    sources = {name: ragged_field(dump, name) for name in fields}
    ordered = {
        "log_prob_gap": log_prob_gap(dump),
        **dict(list(sources.items())[:2]),
        "kept_set_size": nucleus_sizes(dump),
    }
    ordered |= {_page_name(name, dump): source for name, source in sources.items()}
    return {
        name: RaggedArray(_packed(source.values), source.offsets)
        for name, source in ordered.items()
        if source is not None
        and source.values.ndim == 1
        and lengths is not None
        and np.array_equal(source.lengths, lengths)
    }


def _packed(values: NDArray[Any]) -> NDArray[Any]:
    """Use the smallest dtype of a browser that holds every value: uint8, int32, float32, float64.

    Whole numbers beyond 2**53 are rounded by float64; the page marks every number of that size.
    """
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            short = values.astype("<f4")
        return short if np.array_equal(short, values, equal_nan=True) else values.astype("<f8")
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low >= 0 and high <= 255:
        return values.astype("u1")
    limits = np.iinfo(np.int32)
    return values.astype("<i4" if limits.min <= low and high <= limits.max else "<f8")


def _ids_dtype(dump: Dump) -> np.dtype[Any]:
    tokens = ragged_field(dump, "tokens")
    fits = (
        tokens is None
        or not tokens.values.size
        or -(2**31) <= int(tokens.values.min()) <= int(tokens.values.max()) < 2**31
    )
    return np.dtype("<i4" if fits else "<f8")


def _range(strip: RaggedArray, dump: Dump) -> dict[str, float]:
    values, trained = strip.values, trained_tokens(dump)
    if trained is not None and len(trained) == len(values):
        values = values[trained]
    finite = values[np.isfinite(values)]
    return (
        {"low": float(finite.min()), "high": float(finite.max())}
        if finite.size
        else {"low": 0.0, "high": 0.0}
    )


def _priority(dump: Dump, facts: Mapping[str, list[Any]]) -> list[int]:
    """Order the rows by their largest gap.

    One that is not a number comes first: it is what one looks for.
    """
    gaps = facts.get("max_log_prob_gap", [0.0] * dump.num_samples)
    return sorted(
        range(dump.num_samples),
        key=lambda row: -math.inf if gaps[row] != gaps[row] else -(gaps[row] or 0.0),
    )


def _token_blobs(
    dump: Dump, strips: Mapping[str, RaggedArray], order: list[int], limit: int
) -> tuple[str, list[list[int] | None]]:
    """Pack each sample's ids and strips.

    Returns all of it as one text, and per row where in it: start, length, L, R.
    """
    tokens = ragged_field(dump, "tokens")
    spans: list[list[int] | None] = [None] * dump.num_samples
    if tokens is None:
        return "", spans
    pieces: list[str] = []
    kind = _ids_dtype(dump)
    size = 0
    for row in order:
        ids = tokens[row]
        response = len(next(iter(strips.values()))[row]) if strips else 0
        # Widest first: a browser reads typed arrays at multiples of their width only.
        parts = sorted(
            [ids.astype(kind), *(strip[row] for strip in strips.values())],
            key=lambda part: -part.dtype.itemsize,
        )
        packed = base64.b64encode(
            zlib.compress(b"".join(part.tobytes() for part in parts), 1)
        ).decode("ascii")
        if size + len(packed) > limit:
            break
        spans[row] = [size, len(packed), len(ids), response]
        pieces.append(packed)
        size += len(packed)
    return "".join(pieces), spans


def _texts(dump: Dump, rollout: Dump | None) -> dict[str, list[str | None]]:
    rows: list[int | None] = list(range(dump.num_samples))
    source = dump
    if rollout is not None and dump.contract != ROLLOUT_DUMP:
        source = rollout
        rows = [None] * dump.num_samples
        for pair in join(rollout, dump).pairs:
            rows[pair.train_row] = pair.rollout_row
    found = {}
    for name in _TEXT_FIELDS:
        if name in source.fields:
            column = source.column(name)
            values = [None if row is None else column[row] for row in rows]
            found[name] = [
                value
                if value is None or isinstance(value, str)
                else json.dumps(plain_json(value, largest=_EXACT), ensure_ascii=False, indent=1)
                for value in values
            ]
    return found


def _vocabulary(dump: Dump, tokenizer: str | os.PathLike[str] | None) -> dict[int, str]:
    """Return the bytes of the tokens that occur, each byte as one character."""
    tokens = ragged_field(dump, "tokens")
    if tokenizer is None or tokens is None:
        return {}
    known = token_bytes(tokenizer)
    return {
        int(number): known[int(number)].decode("latin-1")
        for number in np.unique(tokens.values)
        if int(number) in known
    }
