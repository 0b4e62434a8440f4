"""The plugin in a real SGLang server on the CPU: every returned set against the model's own logits
in float64.

The server is stock: it finds the plugin through its installed entry point. The module runs once
with the overlap scheduler and once without.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rl_topp import from_sglang_meta, kept_log_probs_from_sglang_meta
from rl_topp.reference import nucleus, softmax

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

VOCAB_SIZE = 85
START_SECONDS = 500
LAUNCHER = Path(__file__).parents[1] / "stubs" / "sglang_cpu_server.py"
Array = npt.NDArray[np.float64]
Params = Mapping[str, Any]
"""Sampling parameters of a request."""
OPT_IN = {"return_top_p_token_ids": True}
MARGIN = 1e-5
"""Ids whose probability, or the mass before them, is nearer to a boundary may fall on either side: the engine computes in float32."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 1.6 M parameters whose logits have a spread of about 2, so that top_p 0.9 keeps between 1 and 60 of 85 ids."""
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


class Server:
    def __init__(self, folder: Path, log: Path, *arguments: str, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            LAUNCHER,
            "--model-path",
            folder,
            "--skip-tokenizer-init",
            "--port",
            self.port,
            *arguments,
        ]
        command += shlex.split(
            "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype"
            " float32 --max-total-tokens 32768 --mem-fraction-static 0.1 --disable-cuda-graph"
            " --skip-server-warmup --sleep-on-idle --random-seed 7"
        )
        self.log = log
        self.overlaps = "--disable-overlap-schedule" not in arguments
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "SGLANG_GRPC_PORT": "1",
                    "TMPDIR": str(log.parent),
                    **environment,
                },
            )

    def wait(self) -> bytes:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                return self.call("model_info")
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.log.read_text()[-3000:]
            )
            time.sleep(0.2)

    def call(self, path: str, body: Params | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return bytes(reply.read())

    def generate(
        self, prompts: Sequence[Any], params: Params | list[dict[str, Any]], **more: Any
    ) -> Any:
        return json.loads(
            self.call(
                "generate",
                {"input_ids": prompts, "sampling_params": params, "return_logprob": True, **more},
            )
        )

    def stop(self) -> None:
        left_behind: set[str] = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self.process.pid:
                    left_behind |= set(re.findall(r"/dev/shm/sglang_loads_\S+", maps.read_text()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for path in left_behind:
            Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def running(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, *arguments: str, **environment: str
) -> Iterator[Server]:
    server = Server(folder, tmp_path_factory.mktemp("server") / "log", *arguments, **environment)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(
    scope="module", params=[(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"]
)
def server(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(model_folder, tmp_path_factory, *request.param) as server:
        yield server


# The float64 reconstruction
# --------------------------------------------------------------------------------------------------------------


def logits_of(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Array:
    """float64 [R, V]: the model's logits before each response token."""
    with torch.no_grad():
        logits: Array = model(torch.tensor([[*prompt, *tokens]])).logits[0].double().numpy()
    return logits[len(prompt) - 1 : -1]


def expected_set(probs: Array, params: Params) -> set[int] | None:
    """The reference's set, or None where an id is too near to a boundary to tell."""
    top_k, top_p, min_p = (
        params.get("top_k", -1),
        params.get("top_p", 1.0),
        params.get("min_p", 0.0),
    )
    ranked = np.sort(probs)[::-1]
    mass_before = np.cumsum(ranked) - ranked
    gaps = [
        np.abs(mass_before - top_p).min() if top_p < 1 else 1.0,
        np.abs(ranked[1:] - min_p * ranked[0]).min() if min_p else 1.0,
    ]
    if 0 < top_k < probs.size:
        gaps.append(ranked[top_k - 1] - ranked[top_k])
    if min(gaps) < MARGIN:
        return None
    return set(
        nucleus(probs, top_k=top_k if top_k > 0 else None, top_p=top_p, min_p=min_p).tolist()
    )


def check_answer(
    model: Any,
    prompt: Sequence[int],
    params: Params,
    answer: Any,
    *,
    change_logits: Callable[[Array, Sequence[int]], Array] = lambda logits, tokens: logits,
) -> int:
    """Check one answer token by token; returns how many sets were compared."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    greedy = params.get("temperature") == 0
    cuts = {**params, "top_k": 1} if greedy else params
    logits = change_logits(logits_of(model, prompt, tokens), tokens)
    probs = softmax(logits, temperature=1.0 if greedy else params.get("temperature", 1.0))
    kept = from_sglang_meta(meta, expected_num_tokens=len(tokens), vocab_size=VOCAB_SIZE)
    kept_log_probs = kept_log_probs_from_sglang_meta(meta, expected_num_tokens=len(tokens))
    assert kept_log_probs is not None
    has_filter = (
        cuts.get("top_p", 1.0) < 1 or cuts.get("top_k", -1) > 0 or cuts.get("min_p", 0.0) > 0
    )
    compared = 0
    for t, token in enumerate(tokens):
        ids = kept.ids[kept.offsets[t] : kept.offsets[t + 1]]
        if not has_filter:
            assert kept.status[t] == 1
            ids = np.arange(VOCAB_SIZE, dtype=np.int32)
        assert token in ids
        assert kept_log_probs[t] == pytest.approx(
            np.log(probs[t, token] / probs[t, ids].sum()), abs=1e-4
        )
        assert meta["output_token_logprobs"][t][0] == pytest.approx(
            np.log(probs[t, token]), abs=1e-4
        )
        expected = expected_set(probs[t], cuts) if has_filter else set(range(VOCAB_SIZE))
        if expected is not None:
            assert set(ids.tolist()) == expected, (params, t)
            compared += 1
    return compared


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
    compared = sum(
        check_answer(model, prompt, params, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    assert compared > 0.95 * 6 * 12, "nearly every set is far from a boundary"


def test_mixed_batches_in_which_only_some_ask(server: Server, model: Any) -> None:
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
    assert plain == asked == mixed
    for prompt, tokens in zip(prompts, plain, strict=True):
        assert logits_of(model, prompt, tokens).argmax(-1).tolist() == tokens


def test_penalties_and_bias_come_before_the_sets(server: Server, model: Any) -> None:
    """With the overlap scheduler SGLang's penalties lag: a step is prepared before the last token is known, and the first counts the prompt's end."""
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

        assert check_answer(model, prompt, params, answer, change_logits=change) > 10


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
    kept = sorted(answers[0]["meta_info"]["rl_topp_kept_ids"][0])
    assert set(kept) == expected_set(probs, params)
    counts = np.bincount([answer["output_ids"][0] for answer in answers], minlength=VOCAB_SIZE)
    assert counts.sum() == counts[kept].sum(), "nothing outside the set"
    expected = probs[kept] / probs[kept].sum() * counts.sum()
    order = np.argsort(expected)
    # Rare ids are pooled, so that every bin expects at least 5.
    rare = order[np.cumsum(expected[order]) < 5]
    bins = (
        np.array([counts[kept][rare].sum(), *np.delete(counts[kept], rare)]),
        np.array([expected[rare].sum(), *np.delete(expected, rare)]),
    )
    assert stats.chisquare(bins[0][bins[1] > 0], bins[1][bins[1] > 0]).pvalue > 1e-6


def test_batches_in_which_nobody_asks_give_stock_tokens(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two servers with one random start, the second without the plugin, asked the same in the same order."""
    prompts = prompts_of(6, 9)
    plain: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 6},
        {"temperature": 0.8, "max_new_tokens": 6},
        {"top_k": 4, "max_new_tokens": 6},
    ]
    tokens = {}
    for plugins in ("rl_topp", "none"):
        with running(model_folder, tmp_path_factory, SGLANG_PLUGINS=plugins) as server:
            answers = [server.generate(prompt, params) for prompt in prompts for params in plain]
            greedy = server.generate(
                prompts, {"temperature": 0, "max_new_tokens": 6, "custom_params": OPT_IN}
            )
        tokens[plugins] = [answer["output_ids"] for answer in [*answers, *greedy]]
        assert ("rl_topp_kept_ids" in greedy[0]["meta_info"]) is (plugins == "rl_topp")
    assert tokens["rl_topp"] == tokens["none"]


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
