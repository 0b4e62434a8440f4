"""Cost models: exact integers, no overflow, honest errors; transformer FLOPs worked out by hand."""

from typing import Any

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.cost import describe_cost, evaluate_cost, integer_costs, read_cost
from rl_schedule.cost.model_shape import read_model_shape

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "token_flops", "pair_flops", "windows"),
    [
        (LLAMA_8B, 15_009_316_864, 524_288, ()),
        (QWEN2_7B, 14_140_571_648, 401_408, ()),
        (QWEN3_06B, 1_191_968_768, 229_376, ()),
        (QWEN3_30B_A3B, 6_083_313_664, 786_432, ()),
        (DEEPSEEK_V3, 73_249_193_984, 4_997_120, ()),
        (GEMMA3_1B, 1_999_503_360, 16_384, ((512, 90_112),)),
        (QWEN3_NEXT, 7_240_351_744, 196_608, ()),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_flops_of_published_configs_match_the_hand_worked_examples(
    config: dict[str, Any], token_flops: int, pair_flops: int, windows: tuple[tuple[int, int], ...]
) -> None:
    """The sums are written out in the docstring of `TransformerCost.from_hf_config`."""
    model = rs.TransformerCost.from_hf_config(config)
    assert model == rs.TransformerCost(
        token_flops=token_flops, pair_flops=pair_flops, window_pair_flops=windows
    )


def test_a_sample_of_a_thousand_tokens_of_llama() -> None:
    model = rs.TransformerCost.from_hf_config(LLAMA_8B)
    assert model(np.array([1000])).tolist() == [15_009_316_864_000 + 524_288 * 500_000]


def test_the_output_projection_uses_heads_times_head_size() -> None:
    """Qwen3-0.6B has 16 * 128 = 2048, not its hidden size 1024.

    2*1024*2048 twice, 4*1024*8*128, 6*1024*3072.
    """
    assert (
        read_model_shape(QWEN3_06B).layers[0].token_flops
        == 4_194_304 + 4_194_304 + 4_194_304 + 18_874_368
    )


def test_dense_and_sparse_layers_are_told_apart() -> None:
    layers = read_model_shape(DEEPSEEK_V3).layers
    assert [layer.token_flops for layer in layers[:4]] == [1_166_934_016] * 3 + [1_170_604_032]


def test_latent_attention_without_a_query_rank_projects_straight_up() -> None:
    full = read_model_shape({**DEEPSEEK_V3, "q_lora_rank": None}).layers[0].token_flops
    assert full - read_model_shape(DEEPSEEK_V3).layers[
        0
    ].token_flops == 2 * 7168 * 128 * 192 - 2 * 1536 * (7168 + 128 * 192)


def test_layer_types_say_which_layers_slide() -> None:
    types = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    config = {**QWEN3_NEXT, "num_hidden_layers": 4, "layer_types": types, "sliding_window": 64}
    layers = read_model_shape(config).layers
    assert [layer.window for layer in layers] == [64, None, None, None]
    assert [bool(layer.pair_flops) for layer in layers] == [True, True, False, True]


def test_qwen2_slides_from_max_window_layers_on() -> None:
    config = {
        **QWEN2_7B,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 20,
    }
    assert [layer.window for layer in read_model_shape(config).layers] == [None] * 20 + [4096] * 8


def test_mistral_slides_everywhere_and_gemma2_every_other_layer() -> None:
    mistral = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    assert {layer.window for layer in read_model_shape(mistral).layers} == {4096}
    gemma = {**LLAMA_8B, "model_type": "gemma2", "sliding_window": 4096}
    assert [layer.window for layer in read_model_shape(gemma).layers[:4]] == [
        4096,
        None,
        4096,
        None,
    ]


def test_mixtral_uses_its_intermediate_size_per_expert() -> None:
    config = {
        **LLAMA_8B,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
    }
    dense = read_model_shape(LLAMA_8B).layers[0].token_flops
    assert read_model_shape(config).layers[0].token_flops - dense == 6 * 4096 * 14336 + 2 * 4096 * 8


def test_a_mlp_without_gate_has_two_matrices() -> None:
    plain = read_model_shape({**LLAMA_8B, "model_type": "starcoder2"}).layers[0].token_flops
    assert read_model_shape(LLAMA_8B).layers[0].token_flops - plain == 2 * 4096 * 14336


def test_a_vision_language_config_is_read_through_its_text_config() -> None:
    assert rs.TransformerCost.from_hf_config(
        {"model_type": "x", "text_config": LLAMA_8B}
    ) == rs.TransformerCost.from_hf_config(LLAMA_8B)


def test_all_missing_numbers_are_named_at_once() -> None:
    with pytest.raises(
        rs.ScheduleError,
        match=r"hidden_size.*num_hidden_layers.*num_attention_heads.*intermediate_size.*vocab_size",
    ):
        rs.TransformerCost.from_hf_config({"model_type": "llama"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA_8B, "layer_types": ["full_attention"] * 3}, "3 entries for 32 layers"),
        ({**LLAMA_8B, "layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({**LLAMA_8B, "hidden_size": "4096"}, "hidden_size"),
        ({**LLAMA_8B, "num_attention_heads": 0}, "num_attention_heads"),
        ([], "dictionary"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(config: Any, words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        rs.TransformerCost.from_hf_config(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
            "hybrid_override_pattern",
        ),
        ({"model_type": "minimax", "attn_type_list": [0, 1]}, "attn_type_list"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "index_topk"),
        ({"model_type": "deepseek_v3", "index_topk": 2048}, "index_topk"),
        ({"model_type": "jamba"}, "'jamba'"),
        ({"model_type": "llama4_text"}, "'llama4_text'"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
    ],
)
def test_layers_that_are_not_known_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    for config in ({**LLAMA_8B, **change}, {"text_config": {**LLAMA_8B, **change}}):
        with pytest.raises(rs.ScheduleError, match="model_type") as caught:
            rs.TransformerCost.from_hf_config(config)
        assert words in str(caught.value)


def test_a_model_that_works_in_place_changes_nothing_of_the_plan() -> None:
    """Two samples of 9 under a cap of 10 do not fit, whatever the cost model does to its array."""

    def quarter(lengths: Any) -> Any:
        lengths //= 4
        return lengths

    plan = rs.build_dp_schedule(
        total_lengths=[9, 9, 9, 9],
        rollout_ids=range(4),
        global_batch_size=4,
        dp_size=2,
        max_tokens_per_gpu=10,
        cost=quarter,
    )
    assert [part.size for part in plan.partitions] == [2, 2]
    assert plan.num_microbatches == (2,)
    lengths = np.array([9, 8])
    assert evaluate_cost(quarter, lengths).tolist() == [2, 2]
    assert lengths.tolist() == [9, 8]


def test_what_a_cost_model_raises_is_an_error_of_this_package() -> None:
    def fail(lengths: Any) -> Any:
        return {}[lengths.size]

    with pytest.raises(rs.ScheduleError, match=r"fail.* raised KeyError for 2 lengths"):
        evaluate_cost(fail, np.array([5, 6]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: rs.QuadraticCost(linear="3"),  # type: ignore[arg-type]
        lambda: rs.QuadraticCost(linear=None),  # type: ignore[arg-type]
        lambda: rs.TransformerCost(token_flops="1", pair_flops=2),  # type: ignore[arg-type]
        lambda: rs.TransformerCost(token_flops=1, pair_flops=2, window_pair_flops=(3,)),  # type: ignore[arg-type]
    ],
)
def test_coefficients_that_are_no_numbers_are_refused(make: Any) -> None:
    with pytest.raises(rs.ScheduleError, match="numbers >= 0"):
        make()


def test_a_window_costs_what_full_attention_costs_up_to_its_size_and_is_linear_beyond() -> None:
    model = rs.TransformerCost(token_flops=0, pair_flops=0, window_pair_flops=((4, 2),))
    assert model(np.array([2, 4, 5, 6])).tolist() == [4.0, 16.0, 24.0, 32.0]


def test_seventy_thousand_tokens_do_not_overflow() -> None:
    """24576 * 70000 + 70000**2; in int32 this is negative."""
    assert rs.QuadraticCost()(np.array([70_000], dtype=np.int32)).tolist() == [6_620_320_000]
    assert (
        rs.TransformerCost.from_hf_config(DEEPSEEK_V3)(np.array([70_000]))[0]
        == 70_000 * 73_249_193_984 + 4_997_120 * 2_450_000_000
    )


def test_token_cost_is_the_length() -> None:
    assert rs.TokenCost()(np.array([3, 5])).tolist() == [3, 5]


def test_integers_that_fit_are_kept() -> None:
    assert integer_costs(np.array([3, 0, 7]), terms=3).tolist() == [3, 0, 7]


def test_floats_are_scaled_by_a_power_of_two_and_rounded() -> None:
    scaled = integer_costs(np.array([0.5, 0.25, 0.25]), terms=1)
    assert scaled[0] == 2 * scaled[1] == 2 * scaled[2]
    assert 2**58 <= int(scaled.sum()) < 2**60


@pytest.mark.parametrize("terms", [1, 1000, 10**6])
def test_no_sum_of_integer_costs_can_overflow(terms: int) -> None:
    costs = integer_costs(np.array([2**62, 2**62 - 1], dtype=np.uint64), terms=terms)
    assert terms * int(costs.sum()) < 2**61
    assert integer_costs(np.array([0.0, 0.0]), terms=terms).tolist() == [0, 0]
    assert integer_costs(np.array([]), terms=terms).size == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda lengths: lengths[:1], "shape"),
        (lambda lengths: -lengths, "5 tokens is -5"),
        (lambda lengths: lengths * float("nan"), "nan"),
        (lambda lengths: np.array(["a"] * lengths.size), "dtype"),
        (lambda lengths: np.iinfo(np.int64).max + lengths, "overflow"),
    ],
)
def test_a_cost_model_that_returns_no_costs_is_refused(model: Any, words: str) -> None:
    with pytest.raises(rs.ScheduleError, match=words):
        evaluate_cost(model, np.array([5, 6]))


@pytest.mark.parametrize(
    "make",
    [lambda: rs.QuadraticCost(linear=-1), lambda: rs.TransformerCost(token_flops=1, pair_flops=-1)],
)
def test_negative_coefficients_are_refused(make: Any) -> None:
    with pytest.raises(rs.ScheduleError, match=">= 0"):
        make()


@pytest.mark.parametrize(
    "model",
    [
        rs.TokenCost(),
        rs.QuadraticCost(linear=3),
        rs.TransformerCost(token_flops=1, pair_flops=2, window_pair_flops=((8, 3),)),
    ],
)
def test_a_model_of_this_package_survives_its_document(model: rs.CostModel) -> None:
    assert read_cost(describe_cost(model)) == model


def test_a_foreign_model_is_named_and_not_rebuilt() -> None:
    document = describe_cost(np.sqrt)
    assert document["kind"] == "custom"
    assert "sqrt" in document["parameters"]["name"]
    assert read_cost(document) is None
