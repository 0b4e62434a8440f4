"""A stand-in for Ray, as small as the calls of `rl_runtime.cluster`.

Actors are objects of this process, and a call is done when it returns.

Topology only: what was asked for is recorded, nothing is computed. `test_stub_parity.py` holds the
signatures to those of the real library.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

__version__ = "0+stub"
RESOURCES = {"CPU": 2.0}
KILLED: list["_Handle"] = []


class ObjectRef:
    """A result or an error that is there already; neither, of a method that lasts."""

    def __class_getitem__(cls, _item: object) -> type[Self]:
        return cls

    def __init__(
        self, value: Any = None, error: BaseException | None = None, *, ready: bool = True
    ) -> None:
        self.value, self.error, self.ready = value, error, ready


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_options: Any) -> Self:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        if self._function.__name__ == "live":
            return ObjectRef(ready=False)
        try:
            value = self._function(
                *[get(item) if isinstance(item, ObjectRef) else item for item in args], **kwargs
            )
            return ObjectRef(asyncio.run(value) if inspect.iscoroutine(value) else value)
        except Exception as error:
            return ObjectRef(error=error)


class _Handle:
    def __init__(self, actor: Any, options: dict[str, Any]) -> None:
        self.actor, self.asked_for = actor, options

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self.actor, name))


class _Class:
    def __init__(self, cls: type[Any], options: dict[str, Any] | None = None) -> None:
        self._cls, self._options = cls, options or {}

    def options(self, **options: Any) -> "_Class":
        return _Class(self._cls, options)

    def remote(self, *args: Any, **kwargs: Any) -> _Handle:
        return _Handle(self._cls(*args, **kwargs), self._options)


def remote(*args: Any, **kwargs: Any) -> _Class | Callable[[type[Any]], _Class]:
    return _Class(args[0]) if args else lambda cls: _Class(cls, kwargs)


def get(object_refs: ObjectRef | list[ObjectRef], *, timeout: float | None = None) -> Any:
    del timeout
    if isinstance(object_refs, list):
        return [get(item) for item in object_refs]
    if object_refs.error is not None:
        raise object_refs.error
    return object_refs.value


def put(value: Any) -> ObjectRef:
    return ObjectRef(value)


def wait(
    ray_waitables: Sequence[ObjectRef],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[ObjectRef], list[ObjectRef]]:
    del timeout, fetch_local
    ready = [item for item in ray_waitables if item.ready][:num_returns]
    return ready, [item for item in ray_waitables if item not in ready]


def kill(actor: _Handle, *, no_restart: bool = True) -> None:
    assert no_restart
    KILLED.append(actor)


def init(address: str | None = None, **_kwargs: Any) -> None:
    del address


def shutdown() -> None:
    return None


def cluster_resources() -> dict[str, float]:
    return dict(RESOURCES)


def available_resources() -> dict[str, float]:
    return dict(RESOURCES)
