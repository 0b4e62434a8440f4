"""Which layout a torch archive has, ours or slime's, and what it is under the contract's names.

A `.pt` file without our header is read as slime's: train dumps (`format_version` 2) and rollout
dumps (`samples` of `Sample.to_dict()`).

Invariant, matched by a test in `tests/golden/test_archives.py`: fields that neither layout names
are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from rl_dump.columns.tagged_json import Tensor
from rl_dump.contract import RESPONSE_FIELDS, ROLLOUT_DUMP, TRAIN_DUMP, DumpHeader
from rl_dump.errors import DumpError
from rl_dump.header import content_problem, header_of

__all__ = ["ArchiveContent", "recognise"]

TRAIN_NAMES = {
    "rollout_mask_sums": "loss_denominators",
    "rollout_top_p_token_ids": "nucleus_ids",
    "rollout_top_p_token_offsets": "nucleus_offsets",
}
"""Names of slime's train dump and ours."""

ROLLOUT_NAMES = {
    **TRAIN_NAMES,
    "index": "sample_index",
    "group_index": "group_ids",
    "rollout_id": "rollout_ids",
    "loss_mask": "loss_masks",
    "response_length": "response_lengths",
    "reward": "raw_reward",
}
"""Names of slime's rollout samples and ours."""

_FINISH_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveContent:
    """An archive's samples under the contract's names, and its header."""

    header: DumpHeader
    """The header; its `fields` are those our own writer noted, else empty."""
    samples: list[dict[str, Any]]
    """One mapping per sample, tensors not read yet."""
    response_fields: frozenset[str]
    """Fields with one value per response token."""


def recognise(root: Any, where: str) -> ArchiveContent:
    """Return the content of an archive.

    Args:
        root: what its pickle holds.
        where: what to name in errors.

    Raises:
        DumpError: neither our layout nor slime's.
        UnsupportedContractError: our layout with another contract.
    """
    if not isinstance(root, dict) or not isinstance(root.get("samples"), list):
        keys = sorted(map(str, root))[:6] if isinstance(root, dict) else type(root).__name__
        raise DumpError(
            f"{where}: a torch archive, but not a dump: it holds {keys}, a dump holds 'samples'"
        )
    samples = root["samples"]
    for row, sample in enumerate(samples):
        if not isinstance(sample, dict) or not all(isinstance(name, str) for name in sample):
            raise DumpError(
                f"{where}: sample {row} is a {type(sample).__name__}, not a mapping of field names"
            )
    if "contract" in root:
        return _own(root, samples, where)
    if "format_version" in root or "dp_shards" in root:
        return _slime_train(root, samples, where)
    return _slime_rollout(root, samples, where)


def _own(root: dict[str, Any], samples: list[dict[str, Any]], where: str) -> ArchiveContent:
    noted = {
        **{str(key): value for key, value in root.items() if key != "samples"},
        "batch_id": root.get("rollout_id"),
        "writer_rank": root.get("rank"),
        "num_samples": len(samples),
        "row_groups": [],
        "checksums": {},
    }
    header = header_of(noted, where=where)
    aligned = {
        name for name, document in header["fields"].items() if document.get("response_aligned")
    }
    return ArchiveContent(header=header, samples=samples, response_fields=frozenset(aligned))


def _slime_train(root: dict[str, Any], samples: list[dict[str, Any]], where: str) -> ArchiveContent:
    if root.get("format_version") != 2:
        raise DumpError(
            f"{where}: a train dump of format_version {root.get('format_version')!r}; without a"
            " contract id, 2 can be read"
        )
    renamed = [_renamed(sample, TRAIN_NAMES) for sample in samples]
    header = _foreign_header(root, TRAIN_DUMP, renamed, where)
    shards = root.get("dp_shards") or []
    rewards = root.get("raw_reward")
    if not isinstance(shards, list) or not isinstance(rewards, (list, type(None))):
        raise DumpError(f"{where}: dp_shards or raw_reward is not a list")
    # Torch's users keep positions in tensors as well; here they are arrays.
    shards = [
        (
            {
                key: value.array if isinstance(value, Tensor) else value
                for key, value in shard.items()
            }
            if isinstance(shard, dict)
            else shard
        )
        for shard in shards
    ]
    inside = content_problem({"dp_shards": shards, "raw_reward": rewards})
    if inside is not None:
        raise DumpError(f"{where}: {inside} is of the wrong type")
    header["dp_shards"] = shards
    header["raw_reward"] = rewards
    return ArchiveContent(
        header=header, samples=renamed, response_fields=frozenset(RESPONSE_FIELDS)
    )


def _slime_rollout(
    root: dict[str, Any], samples: list[dict[str, Any]], where: str
) -> ArchiveContent:
    names = dict(ROLLOUT_NAMES)
    if not all(isinstance(sample.get("reward"), (int, float, type(None))) for sample in samples):
        # A reward may be a mapping of several; the contract's raw_reward is a number.
        del names["reward"]
    renamed = []
    for position, sample in enumerate(samples):
        found = _renamed(sample, names)
        # Its samples stand in rollout order and carry no position of their own.
        found.setdefault("rollout_position", position)
        status = found.get("status")
        if isinstance(status, str):
            found.setdefault("truncated", status == "truncated")
            found.setdefault("finish_reason", _FINISH_REASONS.get(status, status))
        renamed.append(found)
    header = _foreign_header(root, ROLLOUT_DUMP, renamed, where)
    return ArchiveContent(
        header=header, samples=renamed, response_fields=frozenset(RESPONSE_FIELDS)
    )


def _foreign_header(
    root: Mapping[str, Any], contract: str, samples: list[dict[str, Any]], where: str
) -> DumpHeader:
    batch_id, rank = root.get("rollout_id"), root.get("rank", 0)
    if (
        isinstance(batch_id, bool)
        or not isinstance(batch_id, (int, str))
        or not isinstance(rank, int)
    ):
        raise DumpError(f"{where}: rollout_id {batch_id!r} or rank {rank!r} is not a number")
    known = {"samples", "rollout_id", "rank", "dp_shards", "raw_reward", "format_version"}
    header = {
        "contract": contract,
        "minor": 0,
        "producer": {"distribution": "slime", "version": "unknown"},
        "format_version": 2,
        "batch_id": batch_id,
        "writer_rank": rank,
        "num_samples": len(samples),
        "fields": {},
        "dp_shards": [],
        "raw_reward": None,
        "schedule": None,
        "dropped": [],
        "metadata": {str(key): value for key, value in root.items() if key not in known},
        "row_groups": [],
        "checksums": {},
    }
    return cast("DumpHeader", header)


def _renamed(sample: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Use the contract's names.

    A field that already has the contract's name keeps it, and its namesake stays as it is.
    """
    return {
        (names[name] if name in names and names[name] not in sample else name): value
        for name, value in sample.items()
    }
