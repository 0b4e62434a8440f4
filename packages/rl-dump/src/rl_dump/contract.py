"""What the two dump documents contain: ids, versions, field names, dtypes and alignments.

`train-dump.v2` and `rollout-dump.v1` share one header; they differ in the fields of a sample.

Invariants, each matched by a test in `tests/unit/test_contract.py`:

- the JSON Schema in `schemas/<id>.json` and `DumpHeader` name the same keys;
- within a major, keys are only added, each with a default: a reader of an older minor ignores what
  it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

from rl_dump.contract_header import Producer

__all__ = [
    "CONTRACTS",
    "FIELD_RULES",
    "MINOR",
    "RESPONSE_FIELDS",
    "ROLLOUT_DUMP",
    "TRAIN_DUMP",
    "DroppedSample",
    "DumpHeader",
    "FieldDocument",
    "FieldRule",
    "Form",
    "Kind",
]

TRAIN_DUMP: Final = "train-dump.v2"
ROLLOUT_DUMP: Final = "rollout-dump.v1"
MINOR: Final = 0
"""Minor version of both contracts as this release writes them."""
CONTRACTS: Final[dict[str, int]] = {TRAIN_DUMP: MINOR, ROLLOUT_DUMP: MINOR}
"""Newest minor version known here, by contract id."""

RESPONSE_FIELDS: Final[tuple[str, ...]] = (
    "rollout_log_probs",
    "rollout_full_log_probs",
    "teacher_log_probs",
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
"""Float fields with one value per response token.

A producer adds its own: `response_fields=(*RESPONSE_FIELDS, "my_field")`.
"""


Kind: TypeAlias = Literal["scalar", "ragged", "text", "object"]
_Shape: TypeAlias = Literal["[]", "[L]", "[R]", "[R+1]", "[nnz]"]
Form: TypeAlias = Literal["number", "generic", "tensor", "array", "list", "plain"]


class FieldDocument(TypedDict):
    """One column of a dump, as its header describes it."""

    kind: Kind
    """What the column holds per sample.

    `scalar`: one value; `ragged`: an array; `text`: a string; `object`: tagged JSON.
    """
    dtype: str
    """Logical dtype: a numpy name, `bfloat16`, `string` or `json`."""
    stored: str
    """Dtype in the file.

    bfloat16 and float16 are stored as float32 and 64-bit integers as the smallest that fits: both
    are exact.
    """
    trailing: list[int]
    """Dimensions after the ragged one; empty for one value per token."""
    nullable: bool
    """Whether some samples have no value."""
    response_aligned: bool
    """Whether the field has one value per response token.

    Such a field takes part in context-parallel restoring.
    """
    form: Form
    """What the producer held per sample, so that a conversion can give it back.

    A Python number, a numpy scalar (`generic`), a tensor, a numpy array, a list, or `plain`.
    """


class DroppedSample(TypedDict, total=False):
    """A sample that was generated but not trained on, and why."""

    rollout_position: int | None
    """Its place in the flattened rollout batch, 0-based; None or absent where it is unknown."""
    sample_index: int | None
    """The producer's number of the sample; None or absent where it has none."""
    rollout_id: int | None
    """The rollout that it belongs to; None or absent where it has none."""
    reason: str
    """Why it was not trained on, in words; every dropped sample has one."""


class DumpHeader(TypedDict):
    """Everything of a dump but its columns."""

    contract: str
    """`train-dump.v2` or `rollout-dump.v1`."""
    minor: int
    """Minor version of the contract: a higher one only adds keys."""
    producer: Producer
    """The distribution that wrote the dump."""
    format_version: int
    """Version number of the layout that other tools know under this name."""
    batch_id: int | str
    """The batch counter, or a word such as `"eval_3"`."""
    writer_rank: int
    """Global rank of the writing process."""
    num_samples: int
    """N, the number of samples."""
    fields: dict[str, FieldDocument]
    """Every column, by its name."""
    dp_shards: list[dict[str, Any]]
    """One mapping per data-parallel rank; see `header.HeaderKeywords`."""
    raw_reward: list[float] | None
    """Rewards before normalisation, of the whole batch in rollout order; None if not given."""
    schedule: dict[str, Any] | None
    """The plan document (`schedule-plan.v1`) the batch ran under; None if not given."""
    dropped: list[DroppedSample]
    """Samples that were generated but not trained on."""
    metadata: dict[str, Any]
    """Anything else that the producer kept."""
    row_groups: list[int]
    """Samples in each row group of a Parquet file; empty for other containers."""
    checksums: dict[str, list[int]]
    """Per field and row group, the CRC-32 of its values; see `parquet.arrow_columns.checksum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """Dtype and alignment that the contract fixes for one field name."""

    dtype: str
    """Numpy dtype, `string`, or `float`: any floating dtype."""
    shape: _Shape
    """Values per sample.

    `[]` one value; `[L]` prompt and response tokens; `[R]` response tokens; `[R+1]` and `[nnz]` the
    two arrays of a nucleus.
    """


_DTYPES: Final[dict[_Shape, dict[str, str]]] = {
    "[]": {
        "rollout_position": "int64",
        "sample_index": "int64",
        "rollout_ids": "int64",
        "group_ids": "int64",
        "total_lengths": "int64",
        "response_lengths": "int64",
        "rewards": "float64",
        "raw_reward": "float64",
        "truncated": "bool",
        "loss_denominators": "float32",
        "step": "int64",
        "micro_batch": "int64",
        "data_parallel_rank": "int64",
        "finish_reason": "string",
        "prompt": "json",
        "response": "string",
        "label": "json",
        "metadata": "json",
        "dataset": "string",
    },
    "[L]": {"tokens": "int64"},
    "[R]": {
        "loss_masks": "int32",
        "weight_versions": "int64",
        "nucleus_status": "uint8",
        **dict.fromkeys(RESPONSE_FIELDS, "float"),
    },
    "[R+1]": {"nucleus_offsets": "int64"},
    "[nnz]": {"nucleus_ids": "int32"},
}

FIELD_RULES: Final[dict[str, FieldRule]] = {
    name: FieldRule(dtype=dtype, shape=shape)
    for shape, fields in _DTYPES.items()
    for name, dtype in fields.items()
}
"""Dtype and alignment of every field the contracts name; other fields are kept as they come."""
