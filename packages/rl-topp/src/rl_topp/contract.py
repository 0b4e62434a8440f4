"""The contract `nucleus-set.v1`: kept sets as a document with named arrays beside it.

Invariants: `check_header` accepts exactly this id; a newer minor is read, unknown keys
ignored; `schemas/nucleus-set.v1.json` describes the same document as `NucleusSetDocument` (a test
holds the two equal).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Final, Literal, TypedDict

from rl_topp.errors import UnsupportedContractError

__all__ = [
    "ARRAY_DTYPES",
    "CONTRACT",
    "MINOR",
    "SCHEMA_FILE",
    "ArrayDescription",
    "NucleusSetArrays",
    "NucleusSetDocument",
    "Producer",
    "check_header",
    "declaration_problems",
]

CONTRACT: Final = "nucleus-set.v1"
"""Id of the contract, major included."""
MINOR: Final = 0
"""Minor version this package writes."""
SCHEMA_FILE: Final = "nucleus-set.v1.json"
"""JSON Schema of the document, package data under `rl_topp/schemas`."""
ARRAY_DTYPES: Final[Mapping[str, str]] = {"ids": "int32", "offsets": "int64", "status": "uint8"}
"""Names and dtypes of the arrays beside the document."""

_logger = logging.getLogger(__name__)


class ArrayDescription(TypedDict):
    """dtype and shape of one array beside the document."""

    dtype: str
    shape: list[int]


class NucleusSetArrays(TypedDict):
    """The three arrays of the CSR form, described."""

    ids: ArrayDescription
    """int32 [nnz]: kept token ids, one token's set after the other; the order inside a set is free, repeats are not allowed."""
    offsets: ArrayDescription
    """int64 [T+1]: token t owns `ids[offsets[t]:offsets[t+1]]`; the first is 0, the last nnz."""
    status: ArrayDescription
    """uint8 [T]: 0 kept set recorded, 1 no filter (whole vocabulary), 2 not sampled, 3 truncated in transport."""


class Producer(TypedDict):
    """Who wrote a document."""

    distribution: str
    """Name of the distribution, such as "rl-topp"."""
    version: str
    """Its version."""


class NucleusSetDocument(TypedDict):
    """The JSON part of `nucleus-set.v1`."""

    contract: Literal["nucleus-set.v1"]
    minor: int
    producer: Producer
    """Who wrote it."""
    vocab_size: int
    """Number of token ids, unit ids; every id lies in [0, vocab_size)."""
    arrays: NucleusSetArrays


@cache
def _warn_of_newer_minor(minor: int) -> None:
    """Log that `minor` is newer than ours; the cache makes it once per process and minor."""
    _logger.warning(
        "%s: minor %d is newer than %d; keys that this version does not know are ignored",
        CONTRACT,
        minor,
        MINOR,
    )


def check_header(document: Mapping[str, object]) -> None:
    """Accept a document of this contract, or say what it is instead.

    Args:
        document: the JSON object; only `contract` and `minor` are looked at.

    Raises:
        UnsupportedContractError: its `contract` is not `nucleus-set.v1`; the message names both ids
            and the fix.
    """
    if not isinstance(document, Mapping):
        raise UnsupportedContractError(
            f"a {CONTRACT} document is a JSON object, got {type(document).__name__}"
        )
    found = document.get("contract")
    if found != CONTRACT:
        raise UnsupportedContractError(
            f"document has contract {found!r}, this version of rl-topp reads {CONTRACT!r}; write it"
            " again with a matching producer, or install the rl-topp release that reads it"
        )
    minor = document.get("minor", 0)
    if isinstance(minor, int) and minor > MINOR:
        _warn_of_newer_minor(minor)


def declaration_problems(document: Mapping[str, object], sizes: Mapping[str, int]) -> list[str]:
    """Compare what a document declares about its arrays with what lies beside it; return one
    sentence per difference.

    Args:
        document: the JSON object; an array it does not describe is not compared.
        sizes: number of elements per array.
    """
    declared = document.get("arrays", {})
    if not isinstance(declared, Mapping):
        return [f"the document's arrays must be an object, got {type(declared).__name__}"]
    problems = []
    for name, size in sizes.items():
        wanted = {"dtype": ARRAY_DTYPES[name], "shape": [size]}
        description = declared.get(name, wanted)
        if not isinstance(description, Mapping):
            problems.append(
                f"the description of array {name!r} must be an object, got"
                f" {type(description).__name__}"
            )
            continue
        for key, value in wanted.items():
            found = description.get(key, value)
            found = list(found) if isinstance(found, tuple) else found
            if found != value:
                problems.append(
                    f"the document declares {key} {found!r} for array {name!r}, expected {value!r}"
                    " as it lies beside it"
                )
    return problems
