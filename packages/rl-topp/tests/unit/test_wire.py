"""Replies of engines: every form that is accepted, every half or malformed one that is not."""

import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_topp import (
    NucleusError,
    NucleusSet,
    from_sglang_meta,
    kept_log_probs_from_sglang_meta,
    to_wire,
)


def _nucleus(*, ids: Any, offsets: Any, status: Any, vocab_size: int) -> NucleusSet:
    """Lists stand for arrays here: the record converts what it is given."""
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


IDS, OFFSETS = [5, 9, 7], [0, 2, 2, 3]
WANTED = _nucleus(ids=IDS, offsets=OFFSETS, status=[0, 1, 0], vocab_size=10)


def _base64(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


class _Tensor:
    """What a framework's tensor offers: detach, cpu, numpy."""

    def __init__(self, values: list[int]) -> None:
        self._values = np.array(values)

    def detach(self) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self._values


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "base64": _base64,
    "bytes": lambda values: np.array(values, "<i4").tobytes(),
    "ndarray": lambda values: np.array(values, np.int64),
    "tensor": _Tensor,
    "list": list,
}


def _read(meta: Any, num_tokens: int = 3) -> NucleusSet:
    return from_sglang_meta(meta, expected_num_tokens=num_tokens, vocab_size=10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "names",
    [
        ("top_p_token_ids", "top_p_token_offsets"),
        ("top_p_kept_token_ids", "top_p_kept_token_offsets"),
    ],
)
def test_flat_forms_are_read_alike(names: tuple[str, str], form: str) -> None:
    assert _read({names[0]: FORMS[form](IDS), names[1]: FORMS[form](OFFSETS)}) == WANTED


@pytest.mark.parametrize("key", ["rl_topp_kept_ids", "output_token_sampling_mask", "sampling_mask"])
def test_per_token_forms_are_read_alike(key: str) -> None:
    assert _read({key: [[5, 9], None, np.array([7], np.int32)]}) == WANTED


def test_a_native_reply_is_read_as_recorded() -> None:
    """SGLang 0.5.16 and 0.5.17 with `return_sampling_mask`: ids and renormalised log-probs."""
    meta = {
        "output_token_sampling_mask": [[5, 9], [7]],
        "output_token_sampling_mask_length": 2,
        "output_token_sampling_logprobs": [-0.25, 0.0],
    }
    assert _read(meta, 2).offsets.tolist() == [0, 2, 3]
    log_probs = kept_log_probs_from_sglang_meta(meta, expected_num_tokens=2)
    assert log_probs is not None
    assert log_probs.tolist() == [-0.25, 0.0]


@pytest.mark.parametrize("wrap", [dict, lambda parts: SimpleNamespace(**parts)])
def test_vllm_s_mask_as_mapping_or_object(wrap: Any) -> None:
    assert (
        _read({"sampling_mask": wrap({"token_ids": IDS, "offsets": np.array(OFFSETS)})}) == WANTED
    )
    with pytest.raises(NucleusError, match=r"sampling_mask\.offsets is missing"):
        _read({"sampling_mask": wrap({"token_ids": IDS})})


def test_status_travels_beside_our_own_ids() -> None:
    meta = {"rl_topp_kept_ids": [[5, 9], [], [7]], "rl_topp_kept_status": [0, 3, 3]}
    assert _read(meta).status.tolist() == [0, 3, 3]
    with pytest.raises(NucleusError, match="2 entries, expected 3"):
        _read({**meta, "rl_topp_kept_status": [0, 3]})


def test_to_wire_is_json_and_comes_back() -> None:
    nucleus = _nucleus(ids=[5, 9, 1], offsets=[0, 2, 2, 2, 3], status=[0, 1, 2, 3], vocab_size=10)
    assert _read(json.loads(json.dumps(to_wire(nucleus))), 4) == nucleus
    assert _read(to_wire(NucleusSet.empty(vocab_size=10)), 0) == NucleusSet.empty(vocab_size=10)


def test_bytes_per_token_are_the_text_s() -> None:
    wire = to_wire(
        _nucleus(ids=[5, 9, 7, 1], offsets=[0, 2, 3, 4], status=[0, 0, 0], vocab_size=10)
    )
    assert [len(text) for text in wire.values()] == [24, 24, 4]


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, ["no kept sets", "rl_topp_kept_ids", "sglang-check"]),
        ({"top_p_token_ids": IDS}, ["top_p_token_offsets is missing"]),
        ({"top_p_token_offsets": OFFSETS}, ["top_p_token_ids is missing"]),
        ({"rl_topp_kept_ids": _base64(IDS)}, ["rl_topp_kept_offsets is missing"]),
        ({"rl_topp_kept_ids": IDS}, ["rl_topp_kept_offsets is missing"]),
        ({"rl_topp_kept_ids": IDS, "rl_topp_kept_offsets": OFFSETS}, ["rl_topp_kept_status"]),
        ({"rl_topp_kept_offsets": OFFSETS}, ["rl_topp_kept_ids is missing"]),
        (
            {"top_p_token_ids": IDS, "top_p_token_offsets": OFFSETS, "sampling_mask": [[1]] * 3},
            ["top_p_token_ids and sampling_mask"],
        ),
        ({"top_p_token_ids": IDS, "top_p_token_offsets": []}, ["offsets are empty"]),
        ({"top_p_token_ids": IDS, "top_p_token_offsets": [0, 2, 1, 3]}, ["token 1", "from 2 to 1"]),
        (
            {"top_p_token_ids": "not base64!", "top_p_token_offsets": OFFSETS},
            ["top_p_token_ids", "base64"],
        ),
        ({"top_p_token_ids": b"\0\0\0", "top_p_token_offsets": OFFSETS}, ["3 bytes", "4"]),
        ({"top_p_token_ids": [5, 9, 10], "top_p_token_offsets": OFFSETS}, ["token 2", "id 10"]),
        ({"top_p_token_ids": [5.0, 9.0, 1.0], "top_p_token_offsets": OFFSETS}, ["integers"]),
        ({"output_token_sampling_mask": [[1], [2]]}, ["2 entries, expected 3"]),
        ({"output_token_sampling_mask": "AAAA"}, ["list with one entry per token"]),
        ({"rl_topp_kept_ids": [[1], [], [2]]}, ["token 1", "no ids"]),
        ({"rl_topp_kept_ids": {"0": [1]}}, ["list with one entry per token", "dict"]),
        ({"rl_topp_kept_ids": [[1, [2, 3]], None, None]}, ["rl_topp_kept_ids[0]", "flat list"]),
        ({"sampling_mask": {}}, ["token_ids and offsets", "dict without them"]),
        ({"sampling_mask": "AAAA"}, ["token_ids and offsets", "str without them"]),
        (
            {"sampling_mask": {"token_ids": None, "offsets": None}},
            ["token_ids and offsets", "dict without them"],
        ),
        (
            {"top_p_token_ids": IDS, "top_p_token_offsets": [0, 2**63 - 1, -2, 3]},
            ["token 1", "to -2"],
        ),
        (None, ["mapping", "NoneType"]),
    ],
)
def test_half_or_malformed_replies_are_refused(meta: Any, words: list[str]) -> None:
    with pytest.raises(NucleusError) as caught:
        _read(meta)
    for word in words:
        assert word in str(caught.value)


def test_a_reply_without_tokens_needs_no_keys() -> None:
    assert len(_read({}, 0)) == 0


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "words"),
    [(-1, 10, "expected_num_tokens"), (1, None, "vocab_size"), (1, "10", "vocab_size")],
)
def test_sizes_that_are_not_counts_are_refused(
    num_tokens: int, vocab_size: Any, words: str
) -> None:
    with pytest.raises(NucleusError, match=words):
        from_sglang_meta(
            {"rl_topp_kept_ids": [[1]]}, expected_num_tokens=num_tokens, vocab_size=vocab_size
        )


def test_kept_log_probs_are_one_finite_number_per_token() -> None:
    assert kept_log_probs_from_sglang_meta({}, expected_num_tokens=2) is None
    read = kept_log_probs_from_sglang_meta(
        {"rl_topp_kept_log_probs": [-1.5, 0.0]}, expected_num_tokens=2
    )
    assert read is not None
    assert read.dtype == np.float32
    refused: list[tuple[Any, str]] = [
        ([-1.0], "expected \\[2\\]"),
        ([-1.0, float("nan")], "token 1"),
        ([-1.0, None], "token 1"),
        (["x", 0], "token 0 has .* expected one number per token"),
        (["-1", "-2"], "token 0 has .* expected one number per token"),
        ([-1.0, -1e300], "token 1"),
        ([[-1.0, 3], [-2.0, 4]], "shape"),
        ([-1.0, [-2.0]], "one number per token"),
    ]
    for values, words in refused:
        with pytest.raises(NucleusError, match=words):
            kept_log_probs_from_sglang_meta(
                {"rl_topp_kept_log_probs": values}, expected_num_tokens=2
            )
