"""One engine on the CPU: launcher, process, client, weight sync and a real SGLang server."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from near_ties import is_argmax, is_top_p_nucleus
from tokenizers import Tokenizer, models, pre_tokenizers

from rl_runtime.config.recipe import Recipe
from rl_runtime.engine.client import EngineClient
from rl_runtime.engine.generation import Generation, Sampling
from rl_runtime.engine.process import EngineProcess
from rl_runtime.errors import EngineError
from rl_topp.reference import nucleus, softmax

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB_SIZE = 85

T = TypeVar("T")
Tokens = npt.NDArray[np.int64]
Models = dict[str, tuple[Path, Any]]
"""Folder and Hugging Face model, by name."""


def make_model(folder: Path, rng: int) -> Any:
    """A Qwen3 of 1.6 M parameters with random weights and a tokenizer of single characters."""
    torch.manual_seed(rng)
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
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    vocabulary = {
        "<pad>": 0,
        "<eos>": 1,
        "<unk>": 2,
        **{chr(30 + i): i for i in range(3, VOCAB_SIZE)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models_by_name(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, make_model(folder / name, rng)) for rng, name in enumerate("AB")}


@pytest.fixture(scope="module")
def engine(
    models_by_name: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    recipe = Recipe.model_validate(
        {
            "engine": {"start_timeout_seconds": 500},
            "run": {"dir": tmp_path_factory.mktemp("run")},
        }
    )
    engine = EngineProcess(recipe, index=0, model_folder=models_by_name["A"][0])
    engine.start()
    yield engine
    engine.stop()


def use(
    engine: EngineProcess, function: Callable[[EngineClient], Awaitable[T]], **section: Any
) -> T:
    """Run `function(client)` with a client of the engine."""

    async def failure() -> str | None:
        return engine.failure()

    async def main() -> T:
        client = EngineClient(
            engine.url,
            Recipe.model_validate({"engine": section}).engine,
            vocab_size=VOCAB_SIZE,
            failure=failure,
        )
        try:
            return await function(client)
        finally:
            await client.aclose()

    return asyncio.run(main())


def greedy(engine: EngineProcess, prompt: Tokens, count: int = 6) -> list[int]:
    tokens: list[int] = use(
        engine,
        lambda client: client.generate(prompt, Sampling(temperature=0, max_new_tokens=count)),
    ).tokens.tolist()
    return tokens


def is_greedy(model: Any, prompt: Tokens, tokens: list[int]) -> bool:
    """Whether the model would answer so too, up to rounding."""
    answer = np.array(tokens, np.int64)
    return is_argmax(answer, logits_of(model, prompt, answer))


def logits_of(model: Any, prompt: Tokens, tokens: Tokens) -> npt.NDArray[np.float64]:
    with torch.no_grad():
        logits: npt.NDArray[np.float64] = (
            model(torch.tensor([[*prompt, *tokens]]))
            .logits[0, len(prompt) - 1 : -1]
            .double()
            .numpy()
        )
    return logits


def prompts_of(count: int) -> list[Tokens]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 30)) for _ in range(count)]


def test_log_probs_and_nuclei_equal_the_model_in_float64(
    engine: EngineProcess, models_by_name: Models
) -> None:
    """96 answers at once, so that batched attention sees every mixture of lengths."""
    sampling = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=8)

    async def ask(client: EngineClient) -> list[Generation]:
        return await asyncio.gather(
            *(client.generate(prompt, sampling) for prompt in prompts_of(96))
        )

    equal = 0
    for prompt, answer in zip(prompts_of(96), use(engine, ask), strict=True):
        probs = softmax(logits_of(models_by_name["A"][1], prompt, answer.tokens), temperature=0.8)
        taken = probs[np.arange(answer.tokens.size), answer.tokens]
        np.testing.assert_allclose(answer.full_log_probs, np.log(taken), atol=1e-4)
        assert answer.nucleus is not None
        for t, row in enumerate(probs):
            ids = answer.nucleus[t]
            assert answer.tokens[t] in ids
            assert answer.nucleus_log_probs[t] == pytest.approx(
                np.log(taken[t] / row[ids].sum()), abs=1e-4
            )
            assert is_top_p_nucleus(ids, row, 0.9)
            equal += set(ids.tolist()) == set(nucleus(row, top_p=0.9).tolist())
    assert equal > 300


def test_an_answer_ends_at_the_end_of_sequence_id_or_the_limit(engine: EngineProcess) -> None:

    async def ask(client: EngineClient) -> list[Generation]:
        sampling = Sampling(temperature=2.0, max_new_tokens=40)
        return await asyncio.gather(
            *(client.generate(np.array([5, 6, 7]), sampling) for _ in range(64))
        )

    answers = use(engine, ask)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert (
            answer.tokens[-1] == 1 if answer.finish_reason == "stop" else answer.tokens.size == 40
        )
        assert 1 not in answer.tokens[:-1]


def test_weights_and_their_version_change_together(
    engine: EngineProcess, models_by_name: Models
) -> None:
    """Back and forth, also while answers are being drawn: those are aborted with what they have."""
    prompt = np.array([7, 8, 9, 10])

    async def update(client: EngineClient, name: str, version: int) -> list[Generation]:
        weights = {
            key: tensor.numpy()
            for key, tensor in models_by_name[name][1].state_dict().items()
            if key != "lm_head.weight"
        }
        running = [
            asyncio.create_task(
                client.generate(prompt, Sampling(temperature=0, max_new_tokens=400))
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0.3)
        await client.update_weights(weights, version)
        return await asyncio.gather(*running)

    for version, name in ((1, "B"), (2, "A")):
        interrupted = use(engine, partial(update, name=name, version=version))
        assert all(
            answer.finish_reason in ("abort", "stop") and answer.nucleus is not None
            for answer in interrupted
        )
        tokens = greedy(engine, prompt)
        drawn_by = {
            other: is_greedy(model, prompt, tokens) for other, (_, model) in models_by_name.items()
        }
        assert drawn_by == {other: other == name for other in models_by_name}
        assert (
            use(engine, lambda client: client.generate(prompt, Sampling(top_p=0.9))).weight_version
            == version
        )


def test_a_refused_prompt_is_told_and_the_server_goes_on(engine: EngineProcess) -> None:
    with pytest.raises(EngineError, match=r"/generate.*context length"):
        use(engine, lambda client: client.generate(np.full(600, 5), Sampling()))
    assert len(greedy(engine, np.array([5]))) > 0


def test_an_idle_server_leaves_the_cores_alone(engine: EngineProcess) -> None:
    processes = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    time.sleep(1.0)
    before = used()
    time.sleep(3.0)
    assert used() - before < 1.0


def test_a_server_dies_with_the_process_that_started_it(
    models_by_name: Models, tmp_path: Path
) -> None:
    """The starter is killed outright, while the server still loads: no process of it is left."""
    code = f"""
        import sys, time
        from pathlib import Path
        from rl_runtime.config.recipe import Recipe
        from rl_runtime.engine import process as engine
        start_kept = engine._start_kept
        def told(*arguments):
            process = start_kept(*arguments)
            print(process.pid, flush=True)
            return process
        engine._start_kept = told
        folder = Path({str(models_by_name["A"][0])!r})
        recipe = Recipe.model_validate({{"run": {{"dir": {str(tmp_path)!r}}}}})
        engine.EngineProcess(recipe, index=0, model_folder=folder).start()
    """
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    starter.stdout.close()
    _wait_until(lambda: not _alive_in_session(pid), 10)


def test_a_killed_server_is_an_error_at_once_and_leaves_nothing(engine: EngineProcess) -> None:
    """Last, for it ends the module's server."""
    scratch, pid = engine._scratch, engine.pid
    assert scratch is not None and pid is not None

    async def ask(client: EngineClient) -> list[Generation | BaseException]:
        tasks = [
            asyncio.create_task(
                client.generate(np.array([5, 6]), Sampling(temperature=0, max_new_tokens=450))
            )
            for _ in range(8)
        ]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(
            *tasks, client.generate(np.array([5]), Sampling()), return_exceptions=True
        )

    left_behind = {scratch, *_load_files(engine)}
    assert len(left_behind) == 2 and all(path.exists() for path in left_behind)
    started = time.monotonic()
    results = use(engine, ask)
    assert time.monotonic() - started < 10
    assert isinstance(results[-1], EngineError)
    assert "ended with exit code -9" in str(results[-1])
    engine.stop()
    assert _alive_in_session(pid) == []
    _wait_until(lambda: not any(path.exists() for path in left_behind), 5)


def _load_files(engine: EngineProcess) -> set[Path]:
    """Shared-memory files that the server's processes have mapped."""
    maps = "".join(
        Path(f"/proc/{process.pid}/maps").read_text()
        for process in psutil.Process(engine.pid).children(recursive=True)
    )
    return {Path(path) for path in re.findall(r"/dev/shm/sglang_loads_\S+", maps)}


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive_in_session(session: int) -> list[int]:
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return alive
