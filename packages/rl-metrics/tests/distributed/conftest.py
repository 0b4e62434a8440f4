"""A counter of collectives, and a process group of this process alone.

The counter is for tests that pin how many collectives a call makes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

_COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        (
            "all_reduce",
            "all_gather",
            "all_to_all",
            "reduce",
            "gather",
            "scatter",
            "broadcast",
            "barrier",
            "send",
            "recv",
        )
    )
    and callable(getattr(dist, name))
    and name != "reduce_op"
]


@contextmanager
def _counting() -> Iterator[list[str]]:
    """List the names of all collectives called inside, in order.

    One that is made of another is listed with it.
    """
    names: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            names.append(name)
            return function(*arguments, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        yield names


@pytest.fixture
def counting_collectives() -> Callable[[], AbstractContextManager[list[str]]]:
    """The context manager; usable inside a rank, since ranks are forked."""
    return _counting


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    """Make this process the only rank of torch's default process group, over real gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
