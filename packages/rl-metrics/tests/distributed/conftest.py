"""A counter of collectives, for tests that pin how many a call makes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

_COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_reduce", "all_gather", "all_to_all", "reduce", "gather", "scatter", "broadcast", "barrier", "send", "recv"))
    and callable(getattr(dist, name))
    and name != "reduce_op"
]


@contextmanager
def _counting() -> Iterator[list[str]]:
    """List the names of all collectives called inside, in order. One that is made of another is listed with it."""
    names: list[str] = []

    def counted(name: str, function):
        def call(*arguments, **settings):
            names.append(name)
            return function(*arguments, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        yield names


@pytest.fixture
def counting_collectives():
    """The context manager; usable inside a rank, since ranks are forked."""
    return _counting
