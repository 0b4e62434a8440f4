"""Gradients of a real Megatron-Core GPTModel are the same in every mesh of up to four processes.

A mesh is (dp, cp, tp, pp). The same comparison with one wrong factor fails.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rl_metrics import megatron_loss_scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.gradients.conftest import Array, Gradients, Mesh, Scale, StepGradients

pytestmark = pytest.mark.distributed

MESHES: list[Mesh] = [
    mesh for mesh in itertools.product(range(1, 5), repeat=4) if np.prod(mesh) <= 4
]
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5}

WRONG_SCALES: dict[str, Scale] = {
    "context-parallel ranks left out": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) / sizes["cp_size"]
    ),
    "data-parallel ranks counted twice": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) * sizes["dp_size"]
    ),
    "one unit too many": lambda aggregation, sizes: (
        megatron_loss_scale(aggregation, **sizes) * sizes["step_units"] / (sizes["step_units"] + 1)
    ),
}


def _mesh_name(mesh: Mesh) -> str:
    return "".join(
        f"{axis}{size}" for axis, size in zip(("dp", "cp", "tp", "pp"), mesh, strict=True)
    )


@pytest.mark.parametrize("mesh", MESHES, ids=_mesh_name)
def test_gradients_are_those_of_one_process(
    step_gradients: StepGradients,
    one_process: dict[int, Gradients],
    difference: Callable[[dict[str, Array], dict[str, Array]], float],
    mesh: Mesh,
) -> None:
    size = 3 if 3 in mesh[2:] else 4
    found = step_gradients(mesh, size=size)
    for (dtype, aggregation, name), (reference, expected) in one_process[size].items():
        gradient, value = found[dtype, aggregation, name]
        distance = difference(gradient, reference)
        print(
            f"{_mesh_name(mesh)} {str(dtype)[6:]} {aggregation}: gradient {distance:.1e}, loss"
            f" {abs(value / expected - 1):.1e}"
        )
        assert distance <= BOUNDS[dtype]
        assert value == pytest.approx(expected, rel=BOUNDS[dtype])


def test_one_wrong_factor_is_found(
    step_gradients: StepGradients,
    one_process: dict[int, Gradients],
    difference: Callable[[dict[str, Array], dict[str, Array]], float],
) -> None:
    found = step_gradients((2, 2, 1, 1), size=4, scales=WRONG_SCALES)
    assert {name for _, _, name in found} == set(WRONG_SCALES)
    for (dtype, aggregation, name), (gradient, value) in found.items():
        reference, expected = one_process[4][dtype, aggregation, "right"]
        assert difference(gradient, reference) > 1e-3, (aggregation, name)
        assert value == pytest.approx(expected, rel=1e-6), (
            "the reported loss does not depend on the scale"
        )
