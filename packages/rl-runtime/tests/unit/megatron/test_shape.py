"""Hugging Face configs: read into one shape, or refused with all problems."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.errors import RuntimeSetupError
from rl_runtime.megatron.shape import ModelShape, read_model_config

QWEN3_06B = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


def test_the_shape_of_qwen3_06b_is_that_of_its_model_card() -> None:
    shape = ModelShape.from_hf_config(QWEN3_06B)
    assert (shape.num_layers, shape.num_heads, shape.num_key_value_heads, shape.head_dim) == (
        28,
        16,
        8,
        128,
    )
    assert shape.qk_norm
    assert not shape.qkv_bias
    assert shape.tied_embeddings
    assert shape.rope_theta == 1e6


def test_qwen2_has_biases_and_no_norm_of_queries() -> None:
    config = {**QWEN3_06B, "model_type": "qwen2", "head_dim": None}
    shape = ModelShape.from_hf_config(config)
    assert shape.qkv_bias
    assert not shape.qk_norm
    assert shape.head_dim == 64


def test_llama_without_key_value_heads_has_one_per_query_head() -> None:
    config = {**QWEN3_06B, "model_type": "llama"}
    del config["num_key_value_heads"]
    assert ModelShape.from_hf_config(config).num_key_value_heads == 16


def test_rope_settings_are_read_in_both_layouts() -> None:
    old = {**QWEN3_06B, "rope_theta": 5e5}
    new = {
        key: value for key, value in QWEN3_06B.items() if key not in {"rope_theta", "rope_scaling"}
    }
    new["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert ModelShape.from_hf_config(old) == ModelShape.from_hf_config(new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_what_would_be_computed_differently_is_refused_by_name(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(RuntimeSetupError, match=words):
        ModelShape.from_hf_config({**QWEN3_06B, **change})


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(RuntimeSetupError, match=r"hidden_act.*mlp_bias.*hidden_size is missing"):
        ModelShape.from_hf_config(
            {**QWEN3_06B, "hidden_act": "gelu", "mlp_bias": True, "hidden_size": None}
        )


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeSetupError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(RuntimeSetupError, match="holds list"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    assert read_model_config(tmp_path)["hidden_size"] == 1024
