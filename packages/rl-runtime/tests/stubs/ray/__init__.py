"""A stand-in for Ray, as small as the calls of `rl_runtime.cluster`: actors are objects of this process, and a call is done when it returns.

Topology only: what was asked for is recorded, nothing is computed. `test_stub_parity.py` holds the signatures to those of the real library.
"""

import asyncio
import inspect

__version__ = "0+stub"
RESOURCES = {"CPU": 2.0}
KILLED = []


class ObjectRef:
    """A result that is there already, an error that is there already, or (of a method that lasts as long as its actor) neither."""

    def __class_getitem__(cls, _item):
        return cls

    def __init__(self, value=None, error=None, *, ready=True) -> None:
        self.value, self.error, self.ready = value, error, ready


class _Method:
    def __init__(self, function) -> None:
        self._function = function

    def options(self, **_options):
        return self

    def remote(self, *args, **kwargs):
        if self._function.__name__ == "live":
            return ObjectRef(ready=False)
        try:
            value = self._function(*[get(item) if isinstance(item, ObjectRef) else item for item in args], **kwargs)
            return ObjectRef(asyncio.run(value) if inspect.iscoroutine(value) else value)
        except Exception as error:
            return ObjectRef(error=error)


class _Handle:
    def __init__(self, actor, options) -> None:
        self.actor, self.asked_for = actor, options

    def __getattr__(self, name: str):
        return _Method(getattr(self.actor, name))


class _Class:
    def __init__(self, cls, options=None) -> None:
        self._cls, self._options = cls, options or {}

    def options(self, **options):
        return _Class(self._cls, options)

    def remote(self, *args, **kwargs):
        return _Handle(self._cls(*args, **kwargs), self._options)


def remote(*args, **kwargs):
    return _Class(args[0]) if args else lambda cls: _Class(cls, kwargs)


def get(object_refs, *, timeout=None):
    del timeout
    if isinstance(object_refs, list):
        return [get(item) for item in object_refs]
    if object_refs.error is not None:
        raise object_refs.error
    return object_refs.value


def put(value):
    return ObjectRef(value)


def wait(ray_waitables, *, num_returns=1, timeout=None, fetch_local=True):
    del timeout, fetch_local
    ready = [item for item in ray_waitables if item.ready][:num_returns]
    return ready, [item for item in ray_waitables if item not in ready]


def kill(actor, *, no_restart=True) -> None:
    assert no_restart
    KILLED.append(actor)


def init(address=None, **_kwargs) -> None:
    del address


def shutdown() -> None:
    return None


def cluster_resources():
    return dict(RESOURCES)


def available_resources():
    return dict(RESOURCES)
