"""What every contract document shares: its id, its minor version, its producer, its schema.

This file is the same, byte for byte, in every package that writes or reads a contract, so that no
package imports another for it. The id carries the major version, so checking is one comparison.

Invariants: a document with another id is refused, and both ids are named; a newer minor is read
and logged once per process; the schema is package data under `schemas/`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib import metadata, resources
from typing import Any, TypedDict

__all__ = [
    "Producer",
    "UnsupportedContractError",
    "check_header",
    "load_schema",
    "producer",
]

_PACKAGE = __name__.partition(".")[0]
_DISTRIBUTION = _PACKAGE.replace("_", "-")
_log = logging.getLogger(_PACKAGE)


class UnsupportedContractError(ValueError):
    """A document of another contract, or of another major version of one."""


class Producer(TypedDict):
    """Who wrote a document."""

    distribution: str
    """Name of the distribution, such as "rl-dump"."""
    version: str
    """Its version, such as "0.1.0"."""


@cache
def producer() -> Producer:
    """Return what this package writes into its documents about itself."""
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:  # A source tree on the path that was never installed.
        version = "0+unknown"
    return {"distribution": _DISTRIBUTION, "version": version}


@cache
def load_schema(contract: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a contract that this package owns.

    Args:
        contract: its id, such as "train-dump.v2".

    Raises:
        FileNotFoundError: this package owns no such contract.
    """
    text = resources.files(_PACKAGE).joinpath("schemas", f"{contract}.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def check_header(document: object, supported: Mapping[str, int], *, where: str) -> str:
    """Accept a document of a known contract, or say what it is instead.

    Args:
        document: the JSON object; only `contract`, `minor` and `producer` are looked at.
        supported: by contract id, the newest minor version that this reader knows.
        where: the file or argument that holds it, for errors.

    Returns:
        The contract id.

    Raises:
        UnsupportedContractError: no object, no id, or an id that is not in `supported`; the
            message names both sides and the fix.
    """
    ids = " or ".join(repr(contract) for contract in supported)
    if not isinstance(document, Mapping):
        raise UnsupportedContractError(
            f"{where}: expected an object of contract {ids}, got {type(document).__name__}"
        )
    found = document.get("contract")
    if not isinstance(found, str) or found not in supported:
        raise UnsupportedContractError(
            f"{where}: its contract is {found!r}{_written_by(document.get('producer'))}, but"
            f" {_DISTRIBUTION} {producer()['version']} knows {ids} here: give one of that"
            f" contract, or install a release of {_DISTRIBUTION} that knows this one"
        )
    minor = document.get("minor", 0)
    if isinstance(minor, int) and minor > supported[found]:
        _log_newer_minor(found, minor, supported[found])
    return found


def _written_by(found: object) -> str:
    if not isinstance(found, Mapping):
        return ""
    return f" (written by {found.get('distribution')} {found.get('version')})"


@cache
def _log_newer_minor(contract: str, minor: int, known: int) -> None:
    _log.warning(
        "%s: minor %d is newer than %d; keys that this version does not know are ignored",
        contract,
        minor,
        known,
    )
