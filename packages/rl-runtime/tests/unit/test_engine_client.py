"""The engine client against a small server that answers as it is told."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import numpy as np
import pytest

from rl_runtime.config.rollout import EngineSection
from rl_runtime.engine.client import EngineClient
from rl_runtime.engine.generation import Generation, Sampling
from rl_runtime.errors import DeadlineError, EngineError

FILTERED = Sampling(top_p=0.9)

T = TypeVar("T")
Body = dict[str, Any]
"""The JSON of a request to /generate."""
Chunks = Callable[[Body], Iterable[Body | int | None]]
"""A stream by its request: answers, an int for a status code, None where the connection is cut."""


def answer(index: int, tokens: list[int], *, finish: str | None = "stop") -> Body:
    """A chunk for the prompt `index`; without `finish`, one that is not the last."""
    return {
        "index": index,
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": None if finish is None else {"type": finish},
            "weight_version": "3",
            "output_token_logprobs": [[-1.5, token, None] for token in tokens],
            "rl_topp_kept_ids": [[token, 40] for token in tokens],
            "rl_topp_kept_log_probs": [-0.5] * len(tokens),
        },
    }


def echo(body: Body) -> Iterator[Body]:
    """Answer each prompt with its own tokens."""
    for index, tokens in enumerate(body["input_ids"]):
        yield answer(index, tokens[:1], finish=None)
        yield answer(index, tokens)


class Server:
    """Streams `chunks(body)` from /generate, and keeps the bodies of all requests."""

    def __init__(self, chunks: Chunks = echo) -> None:
        self.bodies: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"
                )
                outer.bodies.append(body)
                started = False
                with contextlib.suppress(ConnectionError):
                    for chunk in chunks(body):
                        if chunk is None:
                            self.connection.close()
                            self.close_connection = True
                            return
                        if isinstance(chunk, int):
                            self.reply(chunk, b"no such parameter")
                            return
                        if not started:
                            self.send_response(200)
                            self.send_header("Connection", "close")
                            self.end_headers()
                            started = True
                        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                        self.wfile.flush()
                    self.wfile.write(b"data: [DONE]\n\n")
                self.close_connection = True

            def reply(self, code: int, data: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass

        self.listener = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.listener.server_address[1]}"
        threading.Thread(target=self.listener.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.listener.shutdown()
        self.listener.server_close()


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def make(chunks: Chunks = echo) -> Server:
        servers.append(Server(chunks))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def run(
    url: str,
    use: Callable[[EngineClient], Awaitable[T]],
    *,
    failure: Callable[[], Awaitable[str | None]] | None = None,
    **section: Any,
) -> T:
    async def main() -> T:
        client = EngineClient(url, EngineSection(**section), vocab_size=50, failure=failure)
        try:
            return await asyncio.wait_for(use(client), 60)
        finally:
            await client.aclose()

    return asyncio.run(main())


def one(client: EngineClient, sampling: Sampling = FILTERED) -> Coroutine[Any, Any, Generation]:
    return client.generate(np.array([5, 6]), sampling)


def test_prompts_of_one_moment_share_requests_and_get_their_own_answers(serve: Serve) -> None:
    server = serve()

    async def use(client: EngineClient) -> list[Generation]:
        return await asyncio.gather(
            *(client.generate(np.array([i % 40, 1]), Sampling(top_k=1 + i)) for i in range(130))
        )

    found = run(server.url, use, max_concurrent_requests=200)
    assert [generation.tokens[0] for generation in found] == [i % 40 for i in range(130)]
    assert sorted(len(body["input_ids"]) for body in server.bodies) == [2, 64, 64]
    assert sorted(
        params["top_k"] for body in server.bodies for params in body["sampling_params"]
    ) == list(range(1, 131))


def test_no_more_prompts_are_in_flight_than_allowed(serve: Serve) -> None:
    server = serve()

    async def many(client: EngineClient) -> list[Generation]:
        return await asyncio.gather(*(one(client) for _ in range(20)))

    run(
        server.url,
        many,
        max_concurrent_requests=8,
    )
    assert max(len(body["input_ids"]) for body in server.bodies) <= 8
    assert sum(len(body["input_ids"]) for body in server.bodies) == 20


def test_a_finished_answer_does_not_wait_for_the_others_of_its_request(serve: Serve) -> None:
    release = threading.Event()

    def chunks(body: Body) -> Iterator[Body | None]:
        yield answer(1, [9])
        release.wait(20)
        yield answer(0, [8])

    async def use(client: EngineClient) -> None:
        slow, fast = asyncio.create_task(one(client)), asyncio.create_task(one(client))
        assert (await asyncio.wait_for(fast, 10)).tokens.tolist() == [9]
        assert not slow.done()
        release.set()
        assert (await slow).tokens.tolist() == [8]

    run(serve(chunks).url, use)


def test_a_cancelled_caller_leaves_the_others_alone(serve: Serve) -> None:
    release = threading.Event()

    def chunks(body: Body) -> Iterator[Body | None]:
        release.wait(20)
        yield from echo(body)

    async def use(client: EngineClient) -> None:
        leaving, staying = asyncio.create_task(one(client)), asyncio.create_task(one(client))
        await asyncio.sleep(0.2)
        leaving.cancel()
        release.set()
        assert (await staying).tokens.tolist() == [5, 6]

    run(serve(chunks).url, use)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (lambda body: [answer(0, [77])], "kept sets of an answer cannot be read"),
        (lambda body: [{"error": {"message": "prompt too long"}}], "/generate: prompt too long"),
        (lambda body: [400], "/generate answered 400: no such parameter"),
        (
            lambda body: [answer(0, [7], finish=None)],
            "ended before all of its 1 answers were there",
        ),
    ],
)
def test_a_bad_answer_is_an_error_that_says_what_is_wrong(
    serve: Serve, chunks: Chunks, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        run(serve(chunks).url, one)


def test_a_cut_connection_is_tried_again_for_what_is_still_missing(serve: Serve) -> None:
    def chunks(body: Body) -> Iterator[Body | None]:
        if len(body["input_ids"]) == 3:
            yield answer(1, [9])
            yield None
        else:
            yield from echo(body)

    async def use(client: EngineClient) -> list[Generation]:
        return await asyncio.gather(*(client.generate(np.array([i]), FILTERED) for i in (1, 2, 3)))

    server = serve(chunks)
    assert [generation.tokens.tolist() for generation in run(server.url, use)] == [[1], [9], [3]]
    assert [body["input_ids"] for body in server.bodies] == [[[1], [2], [3]], [[1], [3]]]


def test_a_server_that_always_cuts_is_given_up(serve: Serve) -> None:
    server = serve(lambda body: [None])
    with pytest.raises(EngineError, match="cannot be reached after 4 attempts"):
        run(server.url, one)
    assert len(server.bodies) == 4


def test_a_dead_process_is_not_tried_again() -> None:
    async def failure() -> str:
        return "engine 0 ended with exit code -9"

    started = time.monotonic()
    with pytest.raises(EngineError, match="engine 0 ended with exit code -9"):
        run("http://127.0.0.1:9", one, failure=failure)
    assert time.monotonic() - started < 2


def test_a_living_process_is_tried_again() -> None:
    asked: list[int] = []

    async def failure() -> None:
        asked.append(1)

    with pytest.raises(EngineError, match="cannot be reached after 4 attempts"):
        run("http://127.0.0.1:9", one, failure=failure)
    assert len(asked) == 4


def test_a_request_has_a_deadline(serve: Serve) -> None:
    release = threading.Event()

    def chunks(body: Body) -> Iterator[Body | None]:
        yield answer(0, [1], finish=None)
        release.wait(20)

    with pytest.raises(
        DeadlineError,
        match=r"/generate was not answered within engine.request_timeout_seconds = 0.5",
    ):
        run(serve(chunks).url, one, request_timeout_seconds=0.5)
    release.set()


def test_a_server_that_trickles_bytes_is_late_all_the_same(serve: Serve) -> None:
    """A chunk every 50 ms for ten seconds: no wait for a byte is long, but all of them are."""
    stop = threading.Event()

    def chunks(body: Body) -> Iterator[Body | None]:
        for _ in range(200):
            yield answer(0, [1], finish=None)
            if stop.wait(0.05):
                return

    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"engine.request_timeout_seconds = 0.5"):
        run(serve(chunks).url, one, request_timeout_seconds=0.5)
    assert time.monotonic() - started < 5
    stop.set()


def test_closing_ends_what_is_in_flight(serve: Serve) -> None:
    release = threading.Event()

    def nothing(_body: Body) -> tuple[()]:
        release.wait(10)
        return ()

    async def use(client: EngineClient) -> None:
        task = asyncio.create_task(one(client))
        await asyncio.sleep(0.2)
        await client.aclose()
        with pytest.raises(EngineError, match="the client was closed"):
            await task

    run(serve(nothing).url, use)
    release.set()
