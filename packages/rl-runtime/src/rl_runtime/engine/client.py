"""Talks to one SGLang server: token ids in; ids, log-probs and kept sets out.

Prompts that are asked for at the same time share one HTTP request: a server that gets 512 of them
one by one starts each in a forward pass of its own and takes several times as long. The reply is a
stream, so each answer is handed on when it is finished, whatever the others of its request do.

Invariants: every call has a deadline; only connection errors are tried again, and only a few times;
an answer to a request with a filter always carries its kept sets, or the call fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from rl_runtime.config.rollout import EngineSection
from rl_runtime.errors import DeadlineError, EngineError
from rl_runtime.weights.sync.inline import update_weights
from rl_topp import NucleusError, NucleusSet, from_sglang_meta, kept_log_probs_from_sglang_meta

__all__ = ["EngineClient", "Generation", "ModelInfo", "Sampling"]

_OPT_IN = {"return_top_p_token_ids": True}
"""`custom_params` by which a request asks rl-topp's plugin for its kept sets."""

_ONLY_AT_THE_END = 1 << 30
"""Stream interval, in tokens: one chunk when the first token is there, one when the answer is
finished.
"""

_GATHER_SECONDS = 0.002
"""How long a prompt waits for others to share its request: longer than it takes to start the tasks
of a batch, short against a decode step.
"""

_PROMPTS_PER_REQUEST = 64
"""Prompts of one HTTP request. Fewer cost the server more per prompt, more gain nothing."""

_ATTEMPTS = 4
"""Times that a request is sent when the connection fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn. Example: `Sampling(temperature=1.0, top_p=0.9, max_new_tokens=8)`."""

    temperature: float = 1.0
    """Divides the logits. 0: greedy, log-probs then at temperature 1."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps all."""
    top_k: int = -1
    """Most likely ids kept; -1 keeps all."""
    min_p: float = 0.0
    """Ids below this fraction of the largest probability are cut."""
    max_new_tokens: int = 8
    """Longest answer, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, beside the model's end-of-sequence ids."""

    @property
    def has_filter(self) -> bool:
        """Whether ids can be cut, so that answers carry kept sets."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.temperature == 0.0

    def to_request(self) -> dict[str, Any]:
        """Return SGLang's `sampling_params`."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "stream_interval": _ONLY_AT_THE_END,
        }
        return {**params, "custom_params": _OPT_IN} if self.has_filter else params


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer of R tokens, the end-of-sequence id included.

    R is 0 when it was aborted before its first token.
    """

    tokens: npt.NDArray[np.int64]
    """int64 [R], the sampled ids."""
    full_log_probs: npt.NDArray[np.float32]
    """float32 [R], nats: log-probs of the ids over the vocabulary, at the sampling temperature."""
    kept_log_probs: npt.NDArray[np.float32]
    """float32 [R], nats: over the kept set; equal to `full_log_probs` without a filter."""
    nucleus: NucleusSet | None
    """Kept sets of the R tokens; None without a filter."""
    finish_reason: str
    """"stop", "length" or "abort"."""
    weight_version: int
    """Version of the weights that drew the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a server serves."""

    model_path: str
    """Folder it was started with."""
    weight_version: int
    """Version of its weights; 0 until the first update."""


@dataclass(slots=True)
class _Asked:
    """A prompt that waits for its answer."""

    tokens: list[int]
    sampling: Sampling
    answer: asyncio.Future[Generation]


class EngineClient:
    """Client of one server; belongs to one event loop.

    Example:
        >>> client = EngineClient("http://127.0.0.1:21370", section, vocab_size=85)
        >>> answer = await client.generate(np.array([5, 6, 7]), Sampling(top_p=0.9))
        >>> answer.tokens, answer.kept_log_probs
        (array([17,  4,  1]), array([-0.47, -0.02, -0.61], dtype=float32))
    """

    def __init__(
        self,
        url: str,
        section: EngineSection,
        *,
        vocab_size: int,
        failure: Callable[[], Awaitable[str | None]] | None = None,
    ) -> None:
        """Remember where the server is; nothing is sent yet.

        Args:
            url: base URL.
            section: deadlines and the number of prompts in flight.
            vocab_size: `vocab_size` of the model's config.json; ids at or above it are refused.
            failure: says why the server process is dead, or gives None; asked when a connection
                fails, so that a dead server is not tried again.
        """
        self.url = url
        self._section = section
        self._vocab_size = vocab_size
        self._failure = failure
        self._slots = asyncio.Semaphore(section.max_concurrent_requests)
        self._asked: list[_Asked] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=section.request_timeout_seconds,
            limits=httpx.Limits(max_connections=None),
        )

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        """Draw one answer.

        Args:
            prompt_tokens: int64 [P], P >= 1.
            sampling: how.

        Raises:
            EngineError: the server is dead, refused, or answered without the kept sets that were
                asked for.
            DeadlineError: no answer within `engine.request_timeout_seconds` of being sent.
        """
        async with self._slots:
            asked = _Asked(
                prompt_tokens.tolist(), sampling, asyncio.get_running_loop().create_future()
            )
            if not self._asked:
                asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._send_asked)
            self._asked.append(asked)
            return await asked.answer

    async def generate_many(
        self, prompt_tokens: npt.NDArray[np.int64], count: int, sampling: Sampling
    ) -> list[Generation]:
        """Draw `count` independent answers to one prompt; raises as `generate` does."""
        return list(
            await asyncio.gather(*(self.generate(prompt_tokens, sampling) for _ in range(count)))
        )

    async def model_info(self) -> ModelInfo:
        """Ask what the server serves; raises as `generate` does."""
        info = (await self._call("GET", "/model_info")).json()
        return ModelInfo(model_path=info["model_path"], weight_version=self._version_of(info))

    async def pause(self) -> None:
        """Abort everything that runs and hold new prompts back until `resume`; raises as `generate` does."""
        await self._call("POST", "/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        """Continue after `pause`; raises as `generate` does."""
        await self._call("POST", "/continue_generation", {})

    async def abort(self) -> None:
        """Abort everything that runs: answers come back with what they have and the finish reason "abort"; raises as `generate` does."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def flush(self) -> None:
        """Forget all cached keys and values; waits until nothing runs; raises as `generate` does."""
        await self._call(
            "POST", f"/flush_cache?timeout={self._section.request_timeout_seconds:.1f}"
        )

    async def update_weights(
        self, weights: Mapping[str, npt.NDArray[np.generic]], version: int
    ) -> None:
        """Load weights and check that the server took them; see `rl_runtime.weights.sync.inline.update_weights`."""
        timeout = self._section.request_timeout_seconds
        await asyncio.to_thread(
            update_weights, self.url, weights, version=version, timeout_seconds=timeout
        )

    async def aclose(self) -> None:
        """Cancel what is in flight and close the connections."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._http.aclose()

    def _send_asked(self) -> None:
        """Send the prompts that gathered, in requests of at most `_PROMPTS_PER_REQUEST`."""
        asked, self._asked = self._asked, []
        for start in range(0, len(asked), _PROMPTS_PER_REQUEST):
            task = asyncio.get_running_loop().create_task(
                self._send(asked[start : start + _PROMPTS_PER_REQUEST])
            )
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, asked: Sequence[_Asked]) -> None:
        """Send one request and give each prompt its answer, or all that have none yet the error."""
        try:
            async for attempt in self._attempts():
                with attempt:
                    await self._stream([one for one in asked if not one.answer.done()])
        except BaseException as error:
            failure = (
                error
                if isinstance(error, Exception)
                else EngineError(f"engine {self.url}: the client was closed")
            )
            for one in asked:
                if not one.answer.done():
                    one.answer.set_exception(failure)
            if not isinstance(error, Exception):
                raise

    async def _stream(self, asked: Sequence[_Asked]) -> None:
        """Send the prompts and read the stream of their answers to its end."""
        body = {
            "input_ids": [one.tokens for one in asked],
            "sampling_params": [one.sampling.to_request() for one in asked],
            "return_logprob": True,
            "stream": True,
        }
        async with (
            self._deadline("/generate"),
            self._http.stream("POST", "/generate", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                await response.aread()
                self._refuse("/generate", response)
            is_whole = False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take_chunk(json.loads(line.removeprefix("data: ")), asked)
                is_whole = is_whole or line == "data: [DONE]"
        if not is_whole:
            raise httpx.RemoteProtocolError(f"the stream of /generate at {self.url} was cut")
        if any(not one.answer.done() for one in asked):
            raise EngineError(
                f"engine {self.url}: the stream of /generate ended before all of its {len(asked)}"
                " answers were there"
            )

    def _take_chunk(self, chunk: Mapping[str, Any], asked: Sequence[_Asked]) -> None:
        """Read one chunk; a finished answer goes to whoever waits for it."""
        if "error" in chunk:
            raise EngineError(
                f"engine {self.url}: /generate: {chunk['error'].get('message', chunk['error'])}"
            )
        if chunk["meta_info"]["finish_reason"] is None:
            return
        one = asked[chunk.get("index", 0)]
        # A caller that was cancelled no longer wants it.
        if not one.answer.done():
            one.answer.set_result(self._read_answer(chunk, one.sampling))

    def _read_answer(self, chunk: Mapping[str, Any], sampling: Sampling) -> Generation:
        """Turn the last chunk of an answer into a `Generation`."""
        meta = chunk["meta_info"]
        tokens = np.asarray(chunk["output_ids"], dtype=np.int64)
        full = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)
        nucleus: NucleusSet | None = None
        kept: npt.NDArray[np.float32] | None = full
        try:
            if sampling.has_filter:
                nucleus = from_sglang_meta(
                    meta, expected_num_tokens=tokens.size, vocab_size=self._vocab_size
                )
                kept = (
                    kept_log_probs_from_sglang_meta(meta, expected_num_tokens=tokens.size)
                    if tokens.size
                    else full
                )
        except NucleusError as error:
            raise EngineError(
                f"engine {self.url}: the kept sets of an answer cannot be read: {error}"
            ) from error
        if full.size != tokens.size or kept is None:
            raise EngineError(
                f"engine {self.url}: {tokens.size} tokens came with {full.size} log-probs and"
                f" {0 if kept is None else kept.size} kept-set log-probs"
            )
        return Generation(
            tokens=tokens,
            full_log_probs=full,
            kept_log_probs=kept,
            nucleus=nucleus,
            finish_reason=meta["finish_reason"]["type"],
            weight_version=self._version_of(meta),
        )

    def _version_of(self, info: Mapping[str, Any]) -> int:
        """Read a weight version; SGLang calls the weights that it was started with "default" unless it is told otherwise."""
        version = info["weight_version"]
        if version != "default" and not version.isdecimal():
            raise EngineError(
                f"engine {self.url}: has weight version {version!r}, expected a number: another"
                " program updates it"
            )
        return 0 if version == "default" else int(version)

    async def _call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Send one control request."""
        async for attempt in self._attempts():
            with attempt:
                async with self._deadline(path):
                    response = await self._http.request(method, path, json=body)
        if response.status_code != httpx.codes.OK:
            self._refuse(path, response)
        return response

    def _refuse(self, path: str, response: httpx.Response) -> None:
        raise EngineError(
            f"engine {self.url}: {path} answered {response.status_code}: {response.text[:500]}"
        )

    def _attempts(self) -> AsyncRetrying:
        """Return the retry rule: connection errors only, a few times, and not when the process is known to be dead."""
        return AsyncRetrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=1.0),
            before_sleep=self._raise_if_dead,
            retry_error_callback=self._raise_unreachable,
        )

    async def _raise_if_dead(self, state: RetryCallState) -> None:
        """Raise at once when the process has ended."""
        why = None if self._failure is None else await self._failure()
        if why is not None:
            raise EngineError(why) from (state.outcome.exception() if state.outcome else None)

    async def _raise_unreachable(self, state: RetryCallState) -> None:
        """Raise after the last attempt."""
        await self._raise_if_dead(state)
        cause = state.outcome.exception() if state.outcome else None
        raise EngineError(
            f"engine {self.url}: cannot be reached after {_ATTEMPTS} attempts"
            f" ({type(cause).__name__}: {cause}): is the server alive?"
        ) from cause

    @asynccontextmanager
    async def _deadline(self, path: str) -> AsyncIterator[None]:
        """Bound one request by `engine.request_timeout_seconds`."""
        seconds = self._section.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, httpx.TimeoutException) as error:
            raise DeadlineError(
                f"engine {self.url}: {path} was not answered within engine.request_timeout_seconds"
                f" = {seconds:g}"
            ) from error
