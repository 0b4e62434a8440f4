"""The errors that `rl_runtime.cluster` tells apart."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause = None
