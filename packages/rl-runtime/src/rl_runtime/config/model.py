"""`[model]`: the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = ["ModelSection"]


class ModelSection(Section):
    """The policy: a folder in Hugging Face layout, or the shape of a small Qwen3 model that the run makes and warms up itself."""

    path: str = ""
    """Folder with config.json, *.safetensors and a tokenizer.

    Empty: make a small model of the shape below and warm it up by SFT.
    """

    reference_path: str = ""
    """Folder of the reference policy for the KL term.

    Empty: the policy before the first batch. Read only when `algorithm.kl_coef` > 0.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations, in the trainer and in the engine. bfloat16 needs a GPU."""

    num_layers: int = Field(default=4, ge=1)
    """Transformer layers of the small model."""

    hidden_size: int = Field(default=192, ge=8)
    """Width of the small model's residual stream."""

    num_attention_heads: int = Field(default=6, ge=1)
    """Query heads of the small model."""

    num_key_value_heads: int = Field(default=2, ge=1)
    """Key and value heads of the small model (grouped-query attention)."""

    head_dim: int = Field(default=32, ge=2)
    """Width of one attention head of the small model."""

    intermediate_size: int = Field(default=512, ge=8)
    """Width of the small model's SwiGLU layer."""

    max_position_embeddings: int = Field(default=512, ge=16)
    """Longest sequence of the small model, in tokens."""
