import pytest
import torch

from rl_runtime.megatron.shape import ModelShape
from rl_runtime.megatron.rotary import RotaryTable, apply_rotary, rotary_frequencies

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
    table = RotaryTable(ModelShape.from_hf_config(CONFIG), torch.device("cpu"))
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    rotated = apply_rotary(x, *table.at(torch.tensor([0, 5, 9])))
    torch.testing.assert_close(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_distance_only() -> None:
    table = RotaryTable(ModelShape.from_hf_config(CONFIG), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    query, key = (
        torch.randn(1, 1, 4, generator=generator),
        torch.randn(1, 1, 4, generator=generator),
    )

    def score(query_position: int, key_position: int) -> float:
        q = apply_rotary(query, *table.at(torch.tensor([query_position])))
        return (q * apply_rotary(key, *table.at(torch.tensor([key_position])))).sum().item()

    assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-5)
