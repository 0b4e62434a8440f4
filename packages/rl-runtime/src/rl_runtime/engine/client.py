"""Talks to one SGLang server: token ids in; ids, log-probs and nuclei out.

Prompts that are asked for at the same time share one HTTP request: a server that gets 512 of them
one by one starts each in a forward pass of its own and takes several times as long. The reply is a
stream, so each answer is handed on when it is finished, whatever the others of its request do.

Invariants: every request has a deadline, which bounds all of it, however slowly bytes arrive; only
connection errors are tried again, and only a few times; a caller that is cancelled leaves the
others of its request alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

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
from rl_runtime.engine.generation import Generation, Sampling, read_generation
from rl_runtime.errors import DeadlineError, EngineError
from rl_runtime.weights.sync.inline import update_weights

__all__ = ["EngineClient"]

_GATHER_SECONDS = 0.002
"""How long a prompt waits for others to share its request.

Longer than it takes to start the tasks of a batch, short against a decode step.
"""

_PROMPTS_PER_REQUEST = 64
"""Prompts of one HTTP request. Fewer cost the server more per prompt, more gain nothing."""

_ATTEMPTS = 4
"""Times that a request is sent when the connection fails."""


class _Asked(NamedTuple):
    tokens: list[int]
    """The prompt's ids."""
    sampling: Sampling
    """How to draw the answer."""
    answer: asyncio.Future[Generation]
    """What the caller waits for."""


class EngineClient:
    """Client of one server; belongs to one event loop.

    Example:
        >>> client = EngineClient("http://127.0.0.1:21370", section, vocab_size=85)
        >>> answer = await client.generate(np.array([5, 6, 7]), Sampling(top_p=0.9))
        >>> answer.tokens, answer.nucleus_log_probs
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
        # No timeout of httpx's own: it counts anew with every byte. `_stream` bounds the whole.
        self._http = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(None), limits=httpx.Limits(max_connections=None)
        )

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int64], sampling: Sampling
    ) -> Generation:
        """Draw one answer.

        Args:
            prompt_tokens: int64 [P], P >= 1.
            sampling: how.

        Raises:
            EngineError: the server is dead, refused, or answered without the nuclei that were asked
                for.
            DeadlineError: no answer within `engine.request_timeout_seconds` of being sent.
        """
        async with self._slots:
            loop = asyncio.get_running_loop()
            asked = _Asked(prompt_tokens.tolist(), sampling, loop.create_future())
            if not self._asked:
                loop.call_later(_GATHER_SECONDS, self._send_asked)
            self._asked.append(asked)
            return await asked.answer

    async def update_weights(
        self, weights: Mapping[str, npt.NDArray[np.generic]], version: int
    ) -> None:
        """Load weights and check that the server took them; see `weights.sync.inline`."""
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
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.1, max=1.0),
            before_sleep=self._raise_if_dead,
            retry_error_callback=self._raise_unreachable,
        )
        try:
            async for attempt in attempts:
                with attempt:
                    await self._stream([one for one in asked if not one.answer.done()])
        except BaseException as error:
            # A cancelled task still owes its callers an answer: they would wait for ever.
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
        is_whole = False
        async with self._deadline(), self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise EngineError(
                    f"engine {self.url}: /generate answered {response.status_code}:"
                    f" {response.text[:500]}"
                )
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
            one.answer.set_result(
                read_generation(
                    chunk,
                    one.sampling,
                    vocab_size=self._vocab_size,
                    where=f"engine {self.url}",
                )
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
    async def _deadline(self) -> AsyncIterator[None]:
        """Bound one request by `engine.request_timeout_seconds`."""
        seconds = self._section.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise DeadlineError(
                f"engine {self.url}: /generate was not answered within"
                f" engine.request_timeout_seconds = {seconds:g}"
            ) from error
