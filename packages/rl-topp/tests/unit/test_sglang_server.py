"""The plugin in a real SGLang server on the CPU.

Every returned set is compared with the model's own logits in float64. The server is
stock: it finds the plugin through its installed entry point. The module runs once with the overlap
scheduler and once without.
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from stubs.near_ties import ENGINE_ROUNDING, check_nucleus, check_same_tokens
from stubs.sglang_server import START_SECONDS, Params, Server, running

from rl_topp import from_sglang_meta, kept_log_probs_from_sglang_meta
from rl_topp.reference import softmax

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

VOCAB_SIZE = 85
Array = npt.NDArray[np.float64]
OPT_IN = {"return_top_p_token_ids": True}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Qwen3 whose logits spread by about 2: top_p 0.9 keeps between 1 and 60 of 85 ids."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return transformers.Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(
    scope="module", params=[(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"]
)
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running(model_folder, log, *request.param) as server:
        yield server


def logits_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Array:
    """Return the model's logits before each response token, float64 [R, V]."""
    with torch.no_grad():
        logits: Array = model(torch.tensor([[*prompt, *tokens]])).logits[0].double().numpy()
    return logits[len(prompt) - 1 : -1]


def check_set(ids: Sequence[int], probs: Array, params: Params) -> None:
    """Check one set against float64; the engine computes in float32, so near ties may differ."""
    top_k = params.get("top_k", -1)
    check_nucleus(
        ids,
        probs,
        top_k=top_k if top_k > 0 else None,
        top_p=params.get("top_p", 1.0),
        min_p=params.get("min_p", 0.0),
        rounding=ENGINE_ROUNDING,
    )


def check_answer(
    model: Any,
    prompt: Sequence[int],
    params: Params,
    answer: Any,
    *,
    change_logits: Callable[[Array, Sequence[int]], Array] = lambda logits, tokens: logits,
) -> None:
    """Check one answer token by token."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    greedy = params.get("temperature") == 0
    cuts = {**params, "top_k": 1} if greedy else params
    logits = change_logits(logits_of(model, prompt, tokens), tokens)
    probs = softmax(logits, temperature=1.0 if greedy else params.get("temperature", 1.0))
    nucleus = from_sglang_meta(meta, expected_num_tokens=len(tokens), vocab_size=VOCAB_SIZE)
    kept_log_probs = kept_log_probs_from_sglang_meta(meta, expected_num_tokens=len(tokens))
    assert kept_log_probs is not None
    has_filter = (
        cuts.get("top_p", 1.0) < 1 or cuts.get("top_k", -1) > 0 or cuts.get("min_p", 0.0) > 0
    )
    for t, token in enumerate(tokens):
        if has_filter:
            ids = nucleus[t]
            check_set(ids.tolist(), probs[t], cuts)
        else:
            assert nucleus.status[t] == 1
            ids = np.arange(VOCAB_SIZE, dtype=np.int32)
        assert token in ids
        assert kept_log_probs[t] == pytest.approx(
            np.log(probs[t, token] / probs[t, ids].sum()), abs=1e-4
        )
        assert meta["output_token_logprobs"][t][0] == pytest.approx(
            np.log(probs[t, token]), abs=1e-4
        )


FILTERS: dict[str, dict[str, Any]] = {
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "small-top-p": {"temperature": 0.7, "top_p": 0.3},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "all-three": {"temperature": 0.8, "top_p": 0.8, "top_k": 12, "min_p": 0.05},
    "none": {"temperature": 0.9},
    "greedy": {"temperature": 0},
}


def prompts_of(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.mark.parametrize("name", FILTERS)
def test_sets_equal_the_reconstruction(server: Server, model: Any, name: str) -> None:
    params = {**FILTERS[name], "max_new_tokens": 12, "ignore_eos": True, "custom_params": OPT_IN}
    prompts = prompts_of(6, 1)
    answers = server.generate(prompts, params)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == 12
        check_answer(model, prompt, params, answer)


def test_in_a_mixed_batch_only_those_that_ask_get_sets(server: Server, model: Any) -> None:
    """Lengths differ, so rows leave the batch at different steps and those that stay move up."""
    prompts = prompts_of(28, 2)
    params = [
        {
            **list(FILTERS.values())[i % 7],
            "max_new_tokens": 3 + 5 * i % 17,
            "ignore_eos": True,
            **({"custom_params": OPT_IN} if i % 3 else {}),
        }
        for i in range(28)
    ]
    answers = server.generate(prompts, params)
    for i, (prompt, one, answer) in enumerate(zip(prompts, params, answers, strict=True)):
        assert len(answer["output_ids"]) == one["max_new_tokens"]
        if i % 3:
            check_answer(model, prompt, one, answer)
        else:
            assert not any(answer["meta_info"].get("rl_topp_kept_log_probs", []))


def test_greedy_tokens_do_not_depend_on_who_asks(server: Server, model: Any) -> None:
    prompts = prompts_of(4, 3)
    greedy = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    plain = [answer["output_ids"] for answer in server.generate(prompts, greedy)]
    asked = [
        answer["output_ids"]
        for answer in server.generate(prompts, {**greedy, "custom_params": OPT_IN})
    ]
    sampled = {
        "temperature": 1.0,
        "top_p": 0.8,
        "max_new_tokens": 10,
        "ignore_eos": True,
        "custom_params": OPT_IN,
    }
    mixed = [
        answer["output_ids"]
        for answer in server.generate(prompts * 2, [greedy] * 4 + [sampled] * 4)
    ][:4]
    # Other batches may round otherwise, so an answer may part from the plain one at a near tie.
    for prompt, tokens, *others in zip(prompts, plain, asked, mixed, strict=True):
        probs = softmax(logits_of(model, prompt, tokens))
        highest = probs.argmax(-1).tolist()
        for other in (*others, highest):
            check_same_tokens(tokens, other, probs, rounding=ENGINE_ROUNDING)


def test_penalties_and_bias_come_before_the_sets(server: Server, model: Any) -> None:
    """With the overlap scheduler SGLang's penalties lag.

    A step is prepared before the last token is known, and the first counts the prompt's end.
    """
    params = {
        "temperature": 0.9,
        "top_p": 0.7,
        "frequency_penalty": 0.7,
        "logit_bias": {"9": 2.0},
        "max_new_tokens": 12,
        "ignore_eos": True,
        "custom_params": OPT_IN,
    }

    prompts = prompts_of(3, 4)
    for prompt, answer in zip(prompts, server.generate(prompts, params), strict=True):

        def change(logits: Array, tokens: Sequence[int], prompt: list[int] = prompt) -> Array:
            logits = logits.copy()
            logits[:, 9] += 2.0
            counted = [prompt[-1], *tokens] if server.overlaps else tokens
            for t in range(1, len(tokens)):
                np.subtract.at(logits[t], counted[:t], 0.7)
            return logits

        check_answer(model, prompt, params, answer, change_logits=change)


def test_every_chunk_of_a_stream_is_complete(server: Server, model: Any) -> None:
    prompt = prompts_of(1, 5)[0]
    params = {
        "temperature": 1.0,
        "top_p": 0.9,
        "max_new_tokens": 8,
        "ignore_eos": True,
        "custom_params": OPT_IN,
    }
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": True}
    lines = server.call("generate", body).decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(chunks) >= 4
    for chunk in chunks:
        check_answer(model, prompt, params, chunk)
    assert len(chunks[-1]["output_ids"]) == 8


def test_an_aborted_answer_keeps_what_it_has_and_can_be_continued(
    server: Server, model: Any
) -> None:
    prompt = prompts_of(1, 6)[0]
    params = {
        "temperature": 1.0,
        "top_p": 0.9,
        "max_new_tokens": 400,
        "ignore_eos": True,
        "custom_params": OPT_IN,
    }
    body = {
        "input_ids": [prompt] * 4,
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    last = {}
    with urllib.request.urlopen(request, timeout=120) as reply:
        for number, line in enumerate(reply):
            if number == 40:
                server.call("abort_request", {"abort_all": True})
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                last[chunk["index"]] = chunk
    for chunk in last.values():
        assert chunk["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(chunk["output_ids"]) < 400
        check_answer(model, prompt, params, chunk)
    longer = [*prompt, *last[0]["output_ids"]]
    rest = server.generate(longer, {**params, "max_new_tokens": 5})
    check_answer(model, longer, params, rest)


def test_samples_follow_the_renormalised_set(server: Server, model: Any) -> None:
    """Chi-square on 1,024 first tokens; with 1e-6 a right sampler fails once in a million runs."""
    stats = importlib.import_module("scipy.stats")  # has no type information

    prompt = prompts_of(1, 8)[0]
    params = {"temperature": 1.0, "top_p": 0.8, "max_new_tokens": 1, "custom_params": OPT_IN}
    answers = [answer for _ in range(2) for answer in server.generate([prompt] * 512, params)]
    probs = softmax(logits_of(model, prompt, [0])[0])
    # Sets of other batches may differ at a near tie, so each answer expects its own.
    expected = np.zeros(VOCAB_SIZE)
    for answer in answers:
        ids = answer["meta_info"]["rl_topp_kept_ids"][0]
        check_set(ids, probs, params)
        assert answer["output_ids"][0] in ids
        expected[ids] += probs[ids] / probs[ids].sum()
    counts = np.bincount([answer["output_ids"][0] for answer in answers], minlength=VOCAB_SIZE)
    order = np.argsort(expected)
    # Rare ids are pooled, so that every bin expects at least 5.
    rare = order[np.cumsum(expected[order]) < 5]
    bins = (
        np.array([counts[rare].sum(), *np.delete(counts, rare)]),
        np.array([expected[rare].sum(), *np.delete(expected, rare)]),
    )
    assert stats.chisquare(bins[0][bins[1] > 0], bins[1][bins[1] > 0]).pvalue > 1e-6


def test_batches_in_which_nobody_asks_give_stock_tokens(
    model: Any, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two servers with one random start, one without the plugin, asked the same in one order."""
    prompts = prompts_of(6, 9)
    plain: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 6},
        {"temperature": 0.8, "max_new_tokens": 6},
        {"top_k": 4, "max_new_tokens": 6},
    ]
    sampled, greedy = {}, {}
    for plugins in ("rl_topp", "none"):
        log = tmp_path_factory.mktemp("server") / "log"
        with running(model_folder, log, SGLANG_PLUGINS=plugins) as server:
            answers = [server.generate(prompt, params) for prompt in prompts for params in plain]
            in_one_batch = server.generate(
                prompts, {"temperature": 0, "max_new_tokens": 6, "custom_params": OPT_IN}
            )
        sampled[plugins] = [answer["output_ids"] for answer in answers]
        greedy[plugins] = [answer["output_ids"] for answer in in_one_batch]
        assert ("rl_topp_kept_ids" in in_one_batch[0]["meta_info"]) is (plugins == "rl_topp")
    assert sampled["rl_topp"] == sampled["none"]
    for prompt, tokens, other in zip(prompts, greedy["none"], greedy["rl_topp"], strict=True):
        probs = softmax(logits_of(model, prompt, tokens))
        check_same_tokens(tokens, other, probs, rounding=ENGINE_ROUNDING)


def test_an_unknown_flag_changes_nothing(server: Server) -> None:
    answer = server.generate(
        [5, 6], {"top_p": 0.9, "max_new_tokens": 2, "custom_params": {"something_else": True}}
    )
    assert "rl_topp_kept_ids" not in answer["meta_info"]


def test_the_check_command_says_that_all_is_well() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rl_topp", "sglang-check"],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all 9 hooked functions are as tested" in result.stdout
