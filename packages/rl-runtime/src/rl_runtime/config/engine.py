"""`[engine]`: the SGLang servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["EngineSection"]


class EngineSection(Section):
    """The SGLang servers that sample rollouts."""

    count: int = Field(default=1, ge=1)
    """Number of engines. Prompts are spread over them in turn."""

    gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs, and tensor-parallel ranks, of one engine. 0: the engine runs on the CPU."""

    host: str = "127.0.0.1"
    """Address that the servers listen on."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server; the next ones follow it.

    0: free ports are chosen. A taken port is an error.
    """

    url: str = ""
    """URL of a server that is already running. Empty: the run starts its own."""

    on_failure: Literal["end"] = "end"
    """What a dead engine does to the run. "end": the run ends with an error."""

    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a server may take until it answers, in seconds."""

    request_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long one request may take, in seconds."""

    health_interval_seconds: float = Field(default=2.0, gt=0)
    """Seconds between two checks that the server process lives."""

    max_concurrent_requests: int = Field(default=512, ge=1)
    """Requests in flight to one engine at a time."""

    max_total_tokens: int = Field(default=65536, ge=1024)
    """Tokens that the engine's KV cache holds."""
