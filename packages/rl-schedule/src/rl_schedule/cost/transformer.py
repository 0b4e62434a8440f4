"""Forward FLOPs of a transformer by sample length, from a Hugging Face config.

Decides which work counts: projections, attention, MLP or active experts, router, language-model
head. Not counted: embedding look-up, norms, activations, vision towers, multi-token-prediction
layers. A multiply-add is 2 FLOPs.

Invariants: the cost depends on the length alone, rises with it, and is computed without overflow at
any context length.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rl_schedule.arrays import FloatArray, IntArray
from rl_schedule.cost.model_shape import ModelShape, read_model_shape
from rl_schedule.errors import ScheduleError

__all__ = ["TransformerCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerCost:
    """`c(s) = token_flops * s + pair_flops * s^2 / 2 + sum over windows w of f_w * pairs(s, w)`.

    `s^2 / 2` is the causal half; `pairs(s, w) = s^2 / 2` up to `w` tokens and `w * s - w^2 / 2`
    beyond. Example: `TransformerCost(token_flops=10, pair_flops=4)(np.array([3]))` is 10 * 3 + 4 *
    9 / 2 = 48.
    """

    token_flops: int
    """FLOPs per token whatever the context: every product with weights, and linear attention."""
    pair_flops: int
    """FLOPs per attended (query, key) pair, over all full-attention layers and heads."""
    window_pair_flops: tuple[tuple[int, int], ...] = ()
    """(window in tokens, FLOPs per attended pair over the layers with that window)."""

    def __call__(self, lengths: IntArray, /) -> FloatArray:
        """Return forward FLOPs, float64 [n]; exact up to 2**53."""
        s = lengths.astype(np.float64)
        flops = self.token_flops * s + self.pair_flops * (s * s / 2)
        for window, per_pair in self.window_pair_flops:
            flops = flops + per_pair * np.where(
                s <= window, s * s / 2, window * s - window * window / 2
            )
        return flops

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "TransformerCost":
        """Read the shape of a model from its `config.json`.

        Worked examples, forward FLOPs, each term as in `model_shape`:

        - Llama-3.1-8B (32 layers, H 4096, h 32, g 8, d 128, F 14336, V 128256): per layer and token
          2*4096*4096 + 4*4096*8*128 + 2*4096*4096 + 6*4096*14336 = 436,207,616; head 2*4096*128256
          = 1,050,673,152; token_flops 15,009,316,864; pair_flops 32 * 4*32*128 = 524,288. A sample
          of 1,000 tokens: 15,009,316,864,000 + 524,288 * 500,000.
        - Qwen2.5-7B (28 layers, H 3584, h 28, g 4, F 18944, V 152064): layer 466,092,032 per token,
          head 1,089,994,752, token_flops 14,140,571,648; pair_flops 28 * 4*28*128 = 401,408. Its
          sliding_window is off.
        - Qwen3-0.6B (28 layers, H 1024, h 16, g 8, d 128, F 3072, V 151936): h*d = 2048, so the
          output projection is 2*2048*1024; layer 31,457,280 per token, token_flops 1,191,968,768;
          pair_flops 28 * 8192 = 229,376.
        - Qwen3-30B-A3B (48 layers, H 2048, h 32, g 4, d 128, 128 experts of 768, 8 active, V
          151936): layer 37,748,736 + 6*2048*8*768 + 2*2048*128 = 113,770,496; token_flops
          6,083,313,664, twice the 3.0e9 weights a token meets.
        - DeepSeek-V3 (61 layers, H 7168, h 128, ranks 1536 and 512, n 128, r 64, v 128; 3 dense
          layers of 18432, 256 experts of 2048, 8 active and 1 shared; V 129280): attention
          374,210,560 per token, dense MLP 792,723,456, experts as much plus router 3,670,016;
          token_flops 73,249,193,984; pair_flops 61 * 2*128*(128 + 64 + 128) = 4,997,120.
        - Gemma-3-1B (26 layers, every sixth full, window 512, H 1152, h 4, g 1, d 256, F 6912, V
          262144): layer 53,673,984, token_flops 1,999,503,360; 4 full layers give pair_flops
          16,384, 22 sliding ones 90,112 per pair of 512.
        - Qwen3-Next-80B-A3B (48 layers, every fourth full with gated queries, H 2048; full: h 16, g
          2, d 256; linear: 16 key and 32 value heads of 128, kernel 4; 512 experts of 512, 10
          active, one shared of 512; V 151936): full attention 54,525,952; linear 67,371,008
          (projections) + 65,536 (kernel) + 3,145,728 (state) = 70,582,272; experts and router
          71,307,264; token_flops 7,240,351,744; pair_flops 12 * 4*16*256 = 196,608.

        Raises:
            ScheduleError: a number that the shape needs is missing or malformed; names every such
                key.
        """
        return cls.from_shape(read_model_shape(config))

    @classmethod
    def from_shape(cls, shape: ModelShape) -> "TransformerCost":
        """Add up the layers of a shape."""
        by_window: Counter[int | None] = Counter()
        for layer in shape.layers:
            by_window[layer.window] += layer.pair_flops
        return cls(
            token_flops=sum(layer.token_flops for layer in shape.layers) + shape.head_flops,
            pair_flops=by_window.pop(None, 0),
            window_pair_flops=tuple(
                sorted((window, flops) for window, flops in by_window.items() if window and flops)
            ),
        )

    def __post_init__(self) -> None:
        """Take windows as lists too, as JSON has them; refuse what could make work negative."""
        try:
            windows = tuple((int(window), int(flops)) for window, flops in self.window_pair_flops)
            least = min(self.token_flops, self.pair_flops, *chain.from_iterable(windows))
            good = bool(least >= 0)
        except (TypeError, ValueError, OverflowError):
            good = False
        if not good:
            raise ScheduleError(
                "TransformerCost needs numbers >= 0, and windows as pairs of them, got"
                f" token_flops={self.token_flops!r}, pair_flops={self.pair_flops!r},"
                f" window_pair_flops={self.window_pair_flops!r}"
            )
        object.__setattr__(self, "window_pair_flops", windows)
