"""How the package's autograd functions run: in the dtypes they were given, differentiable once.

Invariants: autocast, which narrows matrix products, changes nothing in forward or backward; a graph
of the backward pass is refused, since the gradient that it would carry is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_topp.errors import NucleusError

__all__ = ["as_given", "first_order"]

Result = TypeVar("Result")


def as_given(function: Callable[..., Result]) -> Callable[..., Result]:
    """Run `function(ctx, tensor, ...)`, a forward or backward, without autocast."""

    @wraps(function)
    def run(ctx: Any, tensor: Tensor, *others: Any) -> Result:
        with torch.autocast(tensor.device.type, enabled=False):
            return function(ctx, tensor, *others)

    return run


def first_order(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Run `backward`, unless its caller wants a graph of it: that is a `NucleusError`.

    Such callers are `create_graph=True`, a Hessian, a gradient penalty.
    """
    once: Callable[..., Result] = once_differentiable(backward)

    @wraps(backward)
    def run(*arguments: Any) -> Result:
        if torch.is_grad_enabled():
            raise NucleusError(
                "scores over kept sets have first derivatives only; call backward without"
                " create_graph=True"
            )
        return once(*arguments)

    return run
