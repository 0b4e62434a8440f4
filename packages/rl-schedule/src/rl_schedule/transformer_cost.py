"""Forward FLOPs of a transformer by sample length, from a Hugging Face config; algorithm layer, above ``cost``.

Decides which work counts: projections, attention, MLP or active experts, router, language-model head. Not counted:
embedding look-up, norms, activations, vision towers, multi-token-prediction layers. A multiply-add is 2 FLOPs.

Invariants: the cost depends on the length alone, rises with it, and is computed without overflow at any context length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_schedule.arrays import FloatArray, IntArray
from rl_schedule.contract import CostDocument
from rl_schedule.errors import ScheduleError
from rl_schedule.model_shape import ModelShape, read_model_shape

__all__ = ["TransformerCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerCost:
    """``c(s) = token_flops * s + pair_flops * s^2 / 2 + sum over windows w of f_w * pairs(s, w)``.

    ``s^2 / 2`` is the causal half; ``pairs(s, w) = s^2 / 2`` up to ``w`` tokens and ``w * s - w^2 / 2`` beyond.
    Example: ``TransformerCost(token_flops=10, pair_flops=4)(np.array([3]))`` is 10 * 3 + 4 * 9 / 2 = 48.
    """

    token_flops: int
    """FLOPs per token that do not depend on the context: every matrix product with weights, and linear attention."""
    pair_flops: int
    """FLOPs per attended (query, key) pair, over all full-attention layers and heads."""
    window_pair_flops: tuple[tuple[int, int], ...] = ()
    """(window in tokens, FLOPs per attended pair over the layers with that window)."""

    def __call__(self, lengths: IntArray, /) -> FloatArray:
        """Return forward FLOPs, float64 [n]; exact up to 2**53."""
        s = lengths.astype(np.float64)
        flops = self.token_flops * s + self.pair_flops * (s * s / 2)
        for window, per_pair in self.window_pair_flops:
            flops = flops + per_pair * np.where(s <= window, s * s / 2, window * s - window * window / 2)
        return flops

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "TransformerCost":
        """Read the shape of a model from its ``config.json``.

        Raises:
            ScheduleError: a key that the shape needs is missing or malformed; names every such key.
        """
        return cls.from_shape(read_model_shape(config))

    @classmethod
    def from_shape(cls, shape: ModelShape) -> "TransformerCost":
        """Add up the layers of a shape."""
        windows: dict[int, int] = {}
        full = 0
        for layer in shape.layers:
            if layer.window is None:
                full += layer.pair_flops
            elif layer.pair_flops:
                windows[layer.window] = windows.get(layer.window, 0) + layer.pair_flops
        tokens = sum(layer.token_flops for layer in shape.layers) + shape.head_flops
        return cls(token_flops=tokens, pair_flops=full, window_pair_flops=tuple(sorted(windows.items())))

    def to_document(self) -> CostDocument:
        """Return the model as JSON values, read back by ``from_parameters``."""
        return {
            "kind": "transformer",
            "parameters": {
                "token_flops": self.token_flops,
                "pair_flops": self.pair_flops,
                "window_pair_flops": [list(entry) for entry in self.window_pair_flops],
            },
        }

    def __post_init__(self) -> None:
        """Refuse a model under which work could be negative."""
        if min(self.token_flops, self.pair_flops, *(value for entry in self.window_pair_flops for value in entry)) < 0:
            raise ScheduleError(f"TransformerCost needs numbers >= 0, got {self}")
