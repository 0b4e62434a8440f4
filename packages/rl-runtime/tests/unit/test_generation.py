"""What SGLang answers is read into arrays, or an error says what it lacks."""

from typing import Any

import numpy as np
import pytest

from rl_runtime.engine.generation import Generation, Sampling, read_generation
from rl_runtime.errors import EngineError

FILTERED = Sampling(top_p=0.9)


def chunk(
    tokens: list[int],
    *,
    finish: str = "stop",
    version: str = "3",
    nucleus: bool = True,
    **meta: Any,
) -> dict[str, Any]:
    """The last chunk of an answer; with `nucleus`, each token was drawn from itself and id 40."""
    keys = {
        "rl_topp_kept_ids": [[token, 40] for token in tokens],
        "rl_topp_kept_log_probs": [-0.5] * len(tokens),
    }
    return {
        "index": 0,
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": version,
            "output_token_logprobs": [[-1.5, token, None] for token in tokens],
            **(keys if nucleus else {}),
            **meta,
        },
    }


def read(given: dict[str, Any], sampling: Sampling = FILTERED) -> Generation:
    return read_generation(given, sampling, vocab_size=50, where="engine http://e")


def test_an_answer_is_read_into_arrays() -> None:
    found = read(chunk([5, 6]))
    assert found.tokens.tolist() == [5, 6] and found.tokens.dtype == np.int64
    assert found.full_log_probs.tolist() == [-1.5, -1.5]
    assert found.nucleus_log_probs.tolist() == [-0.5, -0.5]
    assert found.full_log_probs.dtype == found.nucleus_log_probs.dtype == np.float32
    assert found.nucleus is not None
    assert found.nucleus.ids.tolist() == [5, 40, 6, 40]
    assert (found.finish_reason, found.weight_version) == ("stop", 3)


def test_without_a_filter_there_is_no_nucleus() -> None:
    found = read(chunk([7], nucleus=False), Sampling())
    assert found.nucleus is None
    assert found.nucleus_log_probs is found.full_log_probs


def test_the_weights_that_a_server_was_started_with_are_version_0() -> None:
    assert read(chunk([7], version="default")).weight_version == 0


def test_an_answer_that_was_aborted_before_its_first_token_is_empty() -> None:
    found = read(chunk([], finish="abort", nucleus=False))
    assert found.nucleus is not None
    assert (
        found.tokens.size,
        found.nucleus_log_probs.size,
        len(found.nucleus.offsets),
        found.finish_reason,
    ) == (0, 0, 1, "abort")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            chunk([7], nucleus=False),
            (
                "kept sets of an answer cannot be read: the reply carries no kept sets for its 1"
                " tokens"
            ),
        ),
        (chunk([77]), "kept sets of an answer cannot be read"),
        (
            chunk([7], rl_topp_kept_log_probs=None),
            "1 tokens came with 1 log-probs and 0 kept-set log-probs",
        ),
        (
            chunk([7], output_token_logprobs=[]),
            "1 tokens came with 0 log-probs and 1 kept-set log-probs",
        ),
        (chunk([7], version="mine"), "has weight version 'mine', expected a number"),
    ],
)
def test_a_bad_answer_is_an_error_that_says_what_is_wrong(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=f"^engine http://e: .*{message}"):
        read(given)


@pytest.mark.parametrize(
    ("sampling", "asks"),
    [
        (Sampling(), False),
        (Sampling(top_p=0.5), True),
        (Sampling(top_k=3), True),
        (Sampling(min_p=0.1), True),
        (Sampling(temperature=0), True),
    ],
    ids=["none", "top_p", "top_k", "min_p", "greedy"],
)
def test_nuclei_are_asked_for_exactly_where_a_filter_can_cut(
    sampling: Sampling, asks: bool
) -> None:
    assert sampling.has_filter == asks
    custom = sampling.to_request().get("custom_params")
    assert custom == ({"return_top_p_token_ids": True} if asks else None)
