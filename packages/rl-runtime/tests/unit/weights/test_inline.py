"""Weights inside the request: the pickle without torch, buckets, and what a server may answer."""

import base64
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from rl_runtime.errors import DeadlineError, EngineError
from rl_runtime.weights.sync.inline import named_tensors_pickle, split_into_buckets, update_weights

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_pickle_means_named_torch_tensors(dtype: str) -> None:
    rng = np.random.default_rng(0)
    weights = {
        "a.weight": rng.normal(size=(3, 5)).astype(dtype),
        "ünder": rng.normal(size=7).astype(dtype)[::-1],
        "x": rng.normal(size=(2, 1, 4)).astype(dtype),
    }
    loaded = pickle.loads(named_tensors_pickle(weights))
    assert [name for name, _ in loaded] == list(weights)
    for name, tensor in loaded:
        assert tensor.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(tensor.numpy(), weights[name])


def test_only_names_that_sglangs_unpickler_allows_are_used() -> None:
    """SGLang refuses other modules, and a file descriptor that it cannot open kills it."""
    import pickletools

    opcodes = list(pickletools.genops(named_tensors_pickle({"w": np.ones((2, 2), np.float32)})))
    assert {argument for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"} == {
        "torch reshape",
        "functools partial",
        "torch frombuffer",
        "torch float32",
    }


@pytest.mark.parametrize("array", [np.zeros(3, np.int64), np.zeros((0, 2), np.float32)])
def test_what_is_no_weight_is_named(array: npt.NDArray[Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"weight lm_head: (int64 \[3\]|float32 \[0, 2\]), expected a non-empty array",
    ):
        named_tensors_pickle({"lm_head": array})


def test_buckets_keep_the_order_and_the_limit() -> None:
    weights = {
        name: np.zeros(size, np.float32)
        for name, size in (("a", 2), ("b", 2), ("c", 9), ("d", 1), ("e", 3))
    }
    assert [list(bucket) for bucket in split_into_buckets(weights, 16)] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
    ]
    assert list(split_into_buckets({}, 16)) == []


class Answers:
    """A server that records the calls and answers as it is told."""

    def __init__(
        self, *, refuse: str | None = None, version: str | None = None, hang: str | None = None
    ) -> None:
        calls = self.calls = list[tuple[str, Any]]()
        stop = self.stop = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"
                )
                path = self.path.partition("?")[0]
                calls.append((path, body))
                if path == hang:
                    stop.wait(20)
                if body and body.get("weight_version"):
                    calls.append(("version", body["weight_version"]))
                data = {
                    "weight_version": (
                        version
                        or next(
                            (value for name, value in reversed(calls) if name == "version"), "0"
                        )
                    )
                }
                self.send_response(500 if path == refuse else 200)
                self.end_headers()
                self.wfile.write(b"out of memory" if path == refuse else json.dumps(data).encode())

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.server.shutdown()
        self.server.server_close()


WEIGHTS = {"w": np.ones(2, np.float32)}


def test_an_update_pauses_flushes_loads_and_continues() -> None:
    with Answers() as server:
        update_weights(server.url, WEIGHTS, version=4, timeout_seconds=20, num_tensor_ranks=2)
    assert [path for path, _ in server.calls if path != "version"] == [
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_tensor",
        "/continue_generation",
        "/model_info",
    ]
    body = server.calls[2][1]
    assert body["weight_version"] == "4"
    assert len(body["serialized_named_tensors"]) == 2
    assert base64.b64decode(body["serialized_named_tensors"][1]) == named_tensors_pickle(WEIGHTS)


def test_a_server_that_reports_another_version_is_an_error_that_names_both() -> None:
    with (
        Answers(version="3") as server,
        pytest.raises(EngineError, match="reports weight version '3' after version 4 was sent"),
    ):
        update_weights(server.url, WEIGHTS, version=4, timeout_seconds=20)


@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_tensor"])
def test_a_refused_update_is_quoted_and_generation_continues(path: str) -> None:
    with (
        Answers(refuse=path) as server,
        pytest.raises(EngineError, match=f"{path}.* answered 500: out of memory"),
    ):
        update_weights(server.url, WEIGHTS, version=4, timeout_seconds=20)
    assert server.calls[-1][0] == "/continue_generation"


def test_an_update_has_a_deadline() -> None:
    with (
        Answers(hang="/pause_generation") as server,
        pytest.raises(DeadlineError, match="POST /pause_generation was not answered"),
    ):
        update_weights(server.url, WEIGHTS, version=4, timeout_seconds=0.3)


def test_a_dead_server_is_an_error() -> None:
    with pytest.raises(EngineError, match="the server is dead or cannot be reached"):
        update_weights("http://127.0.0.1:9", WEIGHTS, version=1, timeout_seconds=5)
