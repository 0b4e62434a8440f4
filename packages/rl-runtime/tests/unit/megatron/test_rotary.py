"""Rotary angles: literal frequencies, and laws of rotation."""

import pytest
import torch

from rl_runtime.megatron.rotary import apply_rotary, rotary_angles, rotary_frequencies
from rl_runtime.megatron.shape import ModelShape

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "head_dim": 4,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
}


def test_frequencies_on_literal_numbers() -> None:
    assert rotary_frequencies(ModelShape.from_hf_config(CONFIG)).tolist() == pytest.approx(
        [1.0, 0.1]
    )


def test_llama3_scaling_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = {**CONFIG, "head_dim": 64, "rope_parameters": rope}
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}), "cpu"
    )
    assert scale == 1.0
    torch.testing.assert_close(
        rotary_frequencies(ModelShape.from_hf_config(config)), expected, rtol=1e-6, atol=0
    )


def test_position_zero_changes_nothing_and_lengths_are_kept() -> None:
    frequencies = rotary_frequencies(ModelShape.from_hf_config(CONFIG))
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    rotated = apply_rotary(x, *rotary_angles(torch.tensor([0, 5, 9]), frequencies))
    torch.testing.assert_close(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_distance_only() -> None:
    frequencies = rotary_frequencies(ModelShape.from_hf_config(CONFIG))
    generator = torch.Generator().manual_seed(1)
    query, key = (
        torch.randn(1, 1, 4, generator=generator),
        torch.randn(1, 1, 4, generator=generator),
    )

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rotary(x, *rotary_angles(torch.tensor([position]), frequencies))

    def score(query_position: int, key_position: int) -> float:
        return (rotated(query, query_position) * rotated(key, key_position)).sum().item()

    assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-5)
