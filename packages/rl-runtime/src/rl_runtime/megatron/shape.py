"""What a Hugging Face `config.json` says of a dense decoder, as one record.

Invariants: a config that this trainer would compute differently from the published model (sliding
windows, biases it has no place for, RoPE scalings other than Llama 3's) is refused here, by name,
and never approximated; all problems are reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_runtime.errors import RuntimeSetupError

if TYPE_CHECKING:
    from rl_runtime.config.recipe import Recipe

__all__ = [
    "LLAMA3_SCALING",
    "SUPPORTED_MODEL_TYPES",
    "ModelShape",
    "mesh_problems",
    "read_model_config",
]

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants of the one frequency scaling that is supported, as all its models have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and switches of one dense decoder with RMS norms, rotary embeddings and SwiGLU."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides `num_heads`."""
    head_dim: int
    """Width of one head; `num_heads * head_dim` need not be `hidden_size`."""
    intermediate_size: int
    """Width of the SwiGLU layer."""
    vocab_size: int
    """Token ids, without padding."""
    max_positions: int
    """Longest sequence, in tokens."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_scaling_factor: float | None
    """Factor of Llama 3's frequency scaling; None: not scaled."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    """Whether the query, key and value projections have biases (Qwen2)."""
    qk_norm: bool
    """Whether queries and keys are normed per head (Qwen3)."""

    @classmethod
    def of_folder(cls, folder: Path) -> ModelShape:
        """Read the shape of a Hugging Face folder.

        Raises:
            RuntimeSetupError: as `read_model_config` and `from_hf_config`.
        """
        return cls.from_hf_config(read_model_config(folder))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the shape from a Hugging Face config.

        Args:
            config: the content of `config.json`; `model_type` is one of `SUPPORTED_MODEL_TYPES`.

        Returns:
            The shape. For the config of Qwen3-0.6B: 28 layers, 16 query and 8 key-value heads of
            width 128, hidden size 1024, tied, with qk-norm.

        Raises:
            RuntimeSetupError: another architecture, a missing key, or a feature that the trainer
                does not have; all of them in one message.
        """
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise RuntimeSetupError(
                f"config.json: model_type is {model_type!r}; the trainer knows"
                f" {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        problems = _unsupported(config, model_type)
        problems += [f"{key} is missing" for key in _REQUIRED if config.get(key) is None]
        if problems:
            raise RuntimeSetupError(f"config.json ({model_type}): {'; '.join(problems)}")
        heads = int(config["num_attention_heads"])
        rope = _rope(config)
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            num_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling_factor=(
                float(rope["factor"]) if rope.get("rope_type") == "llama3" else None
            ),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=model_type == "qwen3",
        )


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give RoPE settings one set of names.

    transformers 5 writes `rope_parameters`, older ones `rope_theta` beside `rope_scaling`.
    """
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope.update(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    return rope


def _unsupported(config: Mapping[str, Any], model_type: str) -> list[str]:
    rope = _rope(config)
    kind = rope["rope_type"]
    differing = {
        key: rope.get(key) for key, value in LLAMA3_SCALING.items() if rope.get(key) != value
    }
    activation = config.get("hidden_act", "silu")
    checks = {
        f"hidden_act is {activation!r}, only 'silu' is supported": activation != "silu",
        "use_sliding_window is on, only full attention is supported": config.get(
            "use_sliding_window"
        ),
        "mlp_bias is on, only SwiGLU layers without biases are supported": config.get("mlp_bias"),
        "attention_bias is on, which adds a bias to the output projection; that is not supported": (
            model_type != "qwen2" and config.get("attention_bias")
        ),
        "pretraining_tp is not 1": config.get("pretraining_tp", 1) != 1,
        f"rope scaling {differing} differs from Llama 3's {LLAMA3_SCALING}": (
            kind == "llama3" and differing
        ),
        f"rope_type is {kind!r}, only 'default' and 'llama3' are supported": (
            kind not in ("default", "llama3")
        ),
    }
    return [problem for problem, found in checks.items() if found]


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a Hugging Face folder.

    Args:
        folder: folder with config.json.

    Returns:
        Its content.

    Raises:
        RuntimeSetupError: no such file, or no JSON object in it.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeSetupError(
            f"{path} cannot be read: {error}; give a folder in Hugging Face layout"
        ) from error
    if not isinstance(config, dict):
        raise RuntimeSetupError(f"{path}: holds {type(config).__name__}, not an object")
    return config


def mesh_problems(shape: ModelShape, recipe: Recipe) -> list[str]:
    """List the axes of `[parallel]` that do not divide the model.

    Example:
        6 heads in 2 groups under `parallel.tensor = 4` give "parallel.tensor = 4 does not divide
        num_attention_heads = 6" and one more line for num_key_value_heads.
    """
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    divided = {
        "num_attention_heads": (shape.num_heads, "tensor", tensor),
        "num_key_value_heads": (shape.num_key_value_heads, "tensor", tensor),
        "intermediate_size": (shape.intermediate_size, "tensor", tensor),
        "num_hidden_layers": (shape.num_layers, "pipeline", pipeline),
    }
    problems = [
        f"parallel.{axis} = {size} does not divide {name} = {value}"
        for name, (value, axis, size) in divided.items()
        if value % size
    ]
    if recipe.megatron.get("sequence_parallel") and tensor == 1:
        problems.append("megatron.sequence_parallel needs parallel.tensor > 1")
    return problems
