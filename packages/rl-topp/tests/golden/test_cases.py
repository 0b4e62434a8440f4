"""Every handed case of `cases.json`, by name, with its neighbours."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, from_sglang_meta, reference

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
}
RUN_HERE = {
    "entropy_on_a_set_with_minus_infinity",
    "log_ratio_is_the_kept_mass",
    "singleton",
    "only_one_of_two_fields",
    "offsets_must_start_at_zero",
    "offsets_must_end_at_the_number_of_ids",
    "one_offset_too_few",
    "tool_tokens_before_the_first_generation",
    "abort_then_resume",
}


def test_every_case_has_a_test() -> None:
    assert set(CASES) == RUN_HERE


def _play(events: list[dict[str, Any]], vocab_size: int = 10) -> NucleusSet:
    nucleus = NucleusSet.empty(vocab_size=vocab_size)
    for event in events:
        turn = (
            NucleusSet.not_sampled(event["tool_tokens"], vocab_size=vocab_size)
            if "tool_tokens" in event
            else NucleusSet.from_lists(event["generate"], vocab_size=vocab_size)
        )
        nucleus = nucleus.append(turn)
    return nucleus


@pytest.mark.parametrize("name", ["tool_tokens_before_the_first_generation", "abort_then_resume"])
def test_events_accumulate(name: str) -> None:
    case = CASES[name]
    nucleus = _play(case["events"])
    assert nucleus.status.tolist() == case["expect"]["status"]
    assert nucleus.offsets.tolist() == case["expect"]["offsets"]


def test_tool_tokens_between_and_after_generations_keep_their_place() -> None:
    nucleus = _play(
        [{"generate": [[1, 2]]}, {"tool_tokens": 2}, {"generate": [[3]]}, {"tool_tokens": 1}]
    )
    assert nucleus.status.tolist() == [0, 2, 2, 0, 2]
    assert [ids.tolist() for ids in nucleus] == [[1, 2], [], [], [3], []]


@pytest.mark.parametrize(
    "name",
    ["offsets_must_start_at_zero", "offsets_must_end_at_the_number_of_ids", "one_offset_too_few"],
)
def test_bad_offsets_say_what_was_found_and_expected(name: str) -> None:
    case = CASES[name]
    num_tokens = case.get("expected_num_tokens", len(case["offsets"]) - 1)
    meta = {"top_p_token_ids": case["ids"], "top_p_token_offsets": case["offsets"]}
    with pytest.raises(NucleusError) as caught:
        from_sglang_meta(meta, expected_num_tokens=num_tokens, vocab_size=10)
    with pytest.raises(NucleusError) as direct:
        NucleusSet(
            ids=case["ids"],
            offsets=case["offsets"],
            status=np.zeros(num_tokens, np.uint8),
            vocab_size=10,
        )
    for word in case["expect"]["error_mentions"]:
        assert word in str(caught.value)
        assert word in str(direct.value)


def test_only_one_of_two_fields_names_the_other() -> None:
    case = CASES["only_one_of_two_fields"]
    with pytest.raises(NucleusError) as caught:
        from_sglang_meta(case["meta_info"], expected_num_tokens=1, vocab_size=10)
    for word in case["expect"]["error_mentions"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["log_ratio_is_the_kept_mass", "singleton"])
def test_the_log_prob_is_renormalised_over_the_kept_set(name: str) -> None:
    case = CASES[name]
    assert reference.nucleus(case["probs"], top_p=case["top_p"]).tolist() == case["kept"]
    rows = NucleusSet.from_lists([case["kept"]], vocab_size=len(case["probs"]))
    scores = reference.nucleus_scores(np.log([case["probs"]]), [case["sampled"]], rows)
    expect = case["expect"]
    assert scores.log_probs[0] == pytest.approx(expect["kept_log_prob"], abs=1e-7)
    if "difference" in expect:
        assert scores.full_log_probs[0] == pytest.approx(expect["full_log_prob"], abs=1e-7)
        assert scores.log_probs[0] - scores.full_log_probs[0] == pytest.approx(
            expect["difference"], abs=1e-7
        )


def test_an_id_of_minus_infinity_adds_no_entropy_in_the_reference() -> None:
    case = CASES["entropy_on_a_set_with_minus_infinity"]
    logits = np.array([[float(value) for value in case["logits"]]])
    rows = NucleusSet.from_lists([[0, 1, 2]], vocab_size=3)
    assert reference.nucleus_scores(logits, [1], rows).entropy[0] == pytest.approx(
        case["expect"]["entropy"], abs=1e-5
    )
    gradient = reference.score_gradient(
        logits, [1], reference.keep_mask(rows, [1]), of_entropy=True
    )
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("unfiltered", [False, True])
def test_an_id_of_minus_infinity_adds_no_entropy_on_tensors(unfiltered: bool) -> None:
    torch = pytest.importorskip("torch")
    from rl_topp.torch import nucleus_log_probs

    case = CASES["entropy_on_a_set_with_minus_infinity"]
    logits = torch.tensor([[float(value) for value in case["logits"]]], requires_grad=True)
    rows = (
        NucleusSet.unfiltered(1, vocab_size=3)
        if unfiltered
        else NucleusSet.from_lists([[0, 1, 2]], vocab_size=3)
    )
    scores = nucleus_log_probs(logits, torch.tensor([1]), rows, entropy=True)
    assert scores.entropy is not None
    assert scores.entropy.item() == pytest.approx(case["expect"]["entropy"], abs=1e-5)
    (scores.entropy.sum() + scores.log_probs.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(logits.grad).all()


def test_without_replay_the_ratio_is_off_by_the_kept_mass() -> None:
    """1,000 logits at top_p 0.9: without replay the log-ratio is log(kept mass), with replay 0."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(1, 1000))
    rows = reference.nucleus_of_logits(logits, top_p=0.9)
    scores = reference.nucleus_scores(logits, [int(rows[0][0])], rows)
    mass = reference.softmax(logits)[0, rows[0]].sum()
    assert scores.full_log_probs[0] - scores.log_probs[0] == pytest.approx(
        math.log(mass), abs=1e-12
    )
    assert 0.9 <= mass < 0.9 + reference.softmax(logits).max()
