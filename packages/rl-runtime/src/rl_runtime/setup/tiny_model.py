"""A small Qwen3-shaped model and a character tokenizer, made from a recipe without any download.

The folder it writes has the Hugging Face layout, so the trainer and the engine load it as they load
any model.

Invariants: the same section and random start give the same bytes; the vocabulary has an even number
of ids, so that two tensor-parallel ranks can share it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rl_runtime.config.training import ModelSection

__all__ = ["tiny_model_config", "write_tiny_model"]

_PAD = "<pad>"
_EOS = "<eos>"
_CHARACTERS = (
    "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=().,:;>?'\"[]<_!"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{%"
    " endfor %}{% if add_generation_prompt %} ->{% endif %}"
)
_INITIAL_STD = 0.02
_ROPE_THETA = 1e4
_RMS_NORM_EPS = 1e-6


def write_tiny_model(folder: Path, section: ModelSection, *, rng: int) -> None:
    """Write config, tokenizer and random weights of a small Qwen3 model.

    Weights are N(0, 0.02^2); the projections back into the residual stream are scaled by
    `1 / sqrt(2 * layers)`, as in GPT-2 (Radford et al. 2019, section 2.3); norms are 1.

    Args:
        folder: created; must not exist.
        section: shape and dtype of the model.
        rng: random start of the weights.

    Raises:
        FileExistsError: the folder exists already.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    vocab = _vocabulary()
    _write_tokenizer(folder, vocab, max_length=section.max_position_embeddings)
    _write_json(folder / "config.json", tiny_model_config(section))
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": vocab[_EOS], "pad_token_id": vocab[_PAD]},
    )
    save_file(
        _weights(section, vocab_size=len(vocab), rng=rng),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _vocabulary() -> dict[str, int]:
    tokens = [_PAD, _EOS, "<unk>", *_CHARACTERS]
    tokens += ["<reserved>"] * (len(tokens) % 2)
    return {token: index for index, token in enumerate(tokens)}


def _write_tokenizer(folder: Path, vocab: dict[str, int], *, max_length: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([token for token in vocab if len(token) > 1])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _PAD,
            "eos_token": _EOS,
            "unk_token": "<unk>",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def tiny_model_config(section: ModelSection) -> dict[str, object]:
    """Give the `config.json` of the small model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(_vocabulary()),
        "hidden_size": section.hidden_size,
        "intermediate_size": section.intermediate_size,
        "num_hidden_layers": section.num_layers,
        "num_attention_heads": section.num_attention_heads,
        "num_key_value_heads": section.num_key_value_heads,
        "head_dim": section.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": section.max_position_embeddings,
        "initializer_range": _INITIAL_STD,
        "rms_norm_eps": _RMS_NORM_EPS,
        "rope_theta": _ROPE_THETA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": section.dtype,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _weights(
    section: ModelSection, *, vocab_size: int, rng: int
) -> dict[str, npt.NDArray[np.float32]]:
    generator = np.random.default_rng([rng, 0])
    residual_std = _INITIAL_STD / math.sqrt(2 * section.num_layers)
    hidden, inner = section.hidden_size, section.intermediate_size
    query, key = (
        section.num_attention_heads * section.head_dim,
        section.num_key_value_heads * section.head_dim,
    )

    def normal(rows: int, columns: int, std: float = _INITIAL_STD) -> npt.NDArray[np.float32]:
        return (generator.standard_normal((rows, columns)) * std).astype(np.float32)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, np.float32)

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, hidden),
        "model.norm.weight": ones(hidden),
    }
    for layer in range(section.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones(hidden),
            prefix + "post_attention_layernorm.weight": ones(hidden),
            prefix + "self_attn.q_norm.weight": ones(section.head_dim),
            prefix + "self_attn.k_norm.weight": ones(section.head_dim),
            prefix + "self_attn.q_proj.weight": normal(query, hidden),
            prefix + "self_attn.k_proj.weight": normal(key, hidden),
            prefix + "self_attn.v_proj.weight": normal(key, hidden),
            prefix + "self_attn.o_proj.weight": normal(hidden, query, residual_std),
            prefix + "mlp.gate_proj.weight": normal(inner, hidden),
            prefix + "mlp.up_proj.weight": normal(inner, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, inner, residual_std),
        }
    return weights
