"""Sends weights to an SGLang server inside the request: no shared memory, so it works across hosts.

SGLang wants a pickle of `[(name, tensor), ...]`. `named_tensors_pickle` writes it opcode by opcode,
so that the process that sends needs no torch, and so that nothing in it refers to shared memory:
SGLang's own serializer shares file descriptors, and a server that cannot open them dies.

The order of an update: pause (which aborts what runs), flush the cache of old keys and values,
load, name the version, continue, and read the version back. Without the flush, answers after the
update reuse keys and values of the old weights.

Invariants: the server is never left paused by a failed update that it survived; the version that
the server reports afterwards is the one sent.
"""

from __future__ import annotations

import base64
import io
import pickle
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from rl_runtime.errors import DeadlineError, EngineError

__all__ = ["named_tensors_pickle", "split_into_buckets", "update_weights"]

_BUCKET_BYTES = 512 * 2**20
"""Largest request: base64 and the server's copies take about four times as much memory."""

_TORCH_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
"""dtypes of weights that numpy (with ml_dtypes) and torch call alike."""

NamedArrays = Mapping[str, npt.NDArray[np.generic]]


def update_weights(
    url: str,
    weights: NamedArrays,
    *,
    version: int,
    timeout_seconds: float,
    num_tensor_ranks: int = 1,
) -> None:
    """Load weights into a server and check that it took them.

    Args:
        url: base URL of the server.
        weights: HF name -> array, in the model's HF shapes. All of them, or some.
        version: number of these weights; later answers carry it as `weight_version`.
        timeout_seconds: deadline of the whole update.
        num_tensor_ranks: tensor-parallel ranks of the server; each gets the whole tensors and takes
            its part.

    Raises:
        EngineError: the server refused, died, or reports another version afterwards; the message
            names both.
        DeadlineError: the update took longer than `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    with httpx.Client(base_url=url) as client:
        _call(client, "POST", "/pause_generation", {"mode": "abort"}, deadline)
        try:
            _call(
                client,
                "POST",
                f"/flush_cache?timeout={max(deadline - time.monotonic(), 0.0):.1f}",
                None,
                deadline,
            )
            buckets = list(split_into_buckets(weights, _BUCKET_BYTES))
            for number, bucket in enumerate(buckets, start=1):
                payload = base64.b64encode(named_tensors_pickle(bucket)).decode("ascii")
                is_last = number == len(buckets)
                body = {
                    "serialized_named_tensors": [payload] * num_tensor_ranks,
                    # Nothing ran since the flush above, and each flush collects the garbage of a
                    # large process.
                    "flush_cache": False,
                    "weight_version": str(version) if is_last else None,
                }
                _call(client, "POST", "/update_weights_from_tensor", body, deadline)
        finally:
            _call(client, "POST", "/continue_generation", {}, deadline)
        reported = _call(client, "GET", "/model_info", None, deadline).json()["weight_version"]
    if reported != str(version):
        raise EngineError(
            f"engine {url}: reports weight version {reported!r} after version {version} was sent:"
            " another process updates it too"
        )


def named_tensors_pickle(weights: NamedArrays) -> bytes:
    """Return what `pickle.dumps([(name, tensor), ...])` would mean, without torch.

    Each tensor is the value of an expression of names that SGLang's restricted unpickler allows:

        torch.reshape(functools.partial(torch.frombuffer, dtype=torch.float32)(bytearray), shape)

    Raises:
        ValueError: an array is empty, or has a dtype that no weight has; names the array.
    """
    out = io.BytesIO()
    out.write(pickle.PROTO + bytes([5]) + pickle.EMPTY_LIST + pickle.MARK)
    for name, array in weights.items():
        if array.dtype.name not in _TORCH_DTYPES or array.size == 0:
            raise ValueError(
                f"weight {name}: {array.dtype.name} {list(array.shape)}, expected a non-empty array"
                f" of {', '.join(sorted(_TORCH_DTYPES))}"
            )
        data = np.ascontiguousarray(array).tobytes()
        sizes = b"".join(pickle.BININT + struct.pack("<i", size) for size in array.shape)
        out.writelines(
            [
                _text(name),
                _global("torch", "reshape"),
                # functools.partial(torch.frombuffer, dtype=...): frombuffer takes its dtype by
                # keyword only, and REDUCE passes none.
                _global("functools", "partial"),
                _global("torch", "frombuffer") + pickle.TUPLE1,
                pickle.EMPTY_DICT + _text("dtype") + _global("torch", array.dtype.name),
                pickle.SETITEM + pickle.NEWOBJ_EX,
                # Called with the bytes it gives a flat tensor, which reshape takes with a shape.
                pickle.BYTEARRAY8
                + struct.pack("<Q", len(data))
                + data
                + pickle.TUPLE1
                + pickle.REDUCE,
                pickle.MARK + sizes + pickle.TUPLE,
                pickle.TUPLE2 + pickle.REDUCE,
                # The pair of name and tensor.
                pickle.TUPLE2,
            ]
        )
    out.write(pickle.APPENDS + pickle.STOP)
    return out.getvalue()


def split_into_buckets(
    weights: NamedArrays, bucket_bytes: int
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield the weights in order, in buckets of at most `bucket_bytes`.

    An array that is larger has a bucket of its own.
    """
    bucket: dict[str, npt.NDArray[np.generic]] = {}
    filled = 0
    for name, array in weights.items():
        if bucket and filled + array.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = array
        filled += array.nbytes
    if bucket:
        yield bucket


def _call(
    client: httpx.Client, method: str, path: str, body: Any, deadline: float
) -> httpx.Response:
    """Send one request of the update; anything but success raises."""
    where = f"engine {client.base_url}: {method} {path}"
    try:
        response = client.request(
            method, path, json=body, timeout=max(deadline - time.monotonic(), 0.001)
        )
    except httpx.TimeoutException as error:
        raise DeadlineError(f"{where} was not answered before the update's deadline") from error
    except httpx.TransportError as error:
        raise EngineError(
            f"{where} failed ({type(error).__name__}: {error}): the server is dead or cannot be"
            " reached"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"{where} answered {response.status_code}: {response.text[:500]}")
    return response


def _global(module: str, name: str) -> bytes:
    """Return the opcode that pushes `module.name`."""
    return pickle.GLOBAL + f"{module}\n{name}\n".encode("ascii")


def _text(value: str) -> bytes:
    """Return the opcode that pushes a string."""
    data = value.encode("utf-8")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
