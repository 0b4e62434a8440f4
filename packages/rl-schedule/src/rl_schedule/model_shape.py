"""Layer shapes out of a Hugging Face config; algorithm layer, below ``transformer_cost``.

Decides which attention and which MLP each layer has. Covers dense Llama-shaped models (Llama, Mistral, Qwen2, Qwen3,
Gemma), mixture of experts (Mixtral, Qwen2/3-MoE, gpt-oss, DeepSeek), multi-head latent attention (DeepSeek-V2/V3),
sliding windows (``layer_types``, ``sliding_window_pattern``, ``max_window_layers``) and hybrid linear attention
(Qwen3-Next, ``full_attention_interval``). Invariant: a key that is needed and missing is an error, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_schedule.errors import ScheduleError

__all__ = ["LayerShape", "ModelShape", "read_model_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """FLOPs of one layer."""

    token_flops: int
    """FLOPs per token: projections, MLP or active experts, router."""
    pair_flops: int
    """FLOPs per attended (query, key) pair; 0 for linear attention."""
    window: int | None = None
    """Attended tokens at most; None = all before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """FLOPs of a model, layer by layer."""

    layers: tuple[LayerShape, ...]
    """Every decoder layer, first to last."""
    head_flops: int
    """FLOPs per token of the language-model head: 2 * hidden * vocabulary."""


class _Config:
    """Reads integers and remembers what was missing, so that all missing keys are reported at once."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.missing: list[str] = []

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            self.missing.append(" or ".join(names))
            return 1
        return default

    def optional(self, *names: str) -> int | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def sequence(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        return list(value) if isinstance(value, (list, tuple)) else None


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a ``config.json``; a nested ``text_config`` (vision-language models) is followed.

    Raises:
        ScheduleError: keys the shape needs are missing; all are named.
    """
    if not isinstance(config, Mapping):
        raise ScheduleError(f"an HF config is a dictionary, got {type(config).__name__}; pass json.load of config.json")
    nested = config.get("text_config")
    reader = _Config(nested if isinstance(nested, Mapping) else config)
    hidden = reader.integer("hidden_size")
    kinds = _attention_kinds(reader)
    window = reader.optional("sliding_window")
    layers = []
    for number, kind in enumerate(kinds):
        mixer_tokens, pairs = _linear_attention(reader, hidden) if kind == "linear" else _attention(reader, hidden)
        layers.append(
            LayerShape(
                token_flops=mixer_tokens + _feed_forward(reader, hidden, number),
                pair_flops=pairs,
                window=window if kind == "sliding" else None,
            )
        )
    shape = ModelShape(layers=tuple(layers), head_flops=2 * hidden * reader.integer("vocab_size"))
    if reader.missing:
        missing = ", ".join(dict.fromkeys(reader.missing))
        raise ScheduleError(f"the config of model_type {reader.values.get('model_type')!r} lacks {missing}; TransformerCost cannot be derived")
    return shape


def _attention_kinds(reader: _Config) -> list[str]:
    """Return ``full``, ``sliding`` or ``linear`` for each layer."""
    count = reader.integer("num_hidden_layers")
    names = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}
    types = reader.sequence("layer_types")
    if types is not None:
        unknown = sorted({str(kind) for kind in types} - names.keys())
        if unknown or len(types) != count:
            raise ScheduleError(f"layer_types has {len(types)} entries for {count} layers, unknown kinds: {unknown}")
        return [names[kind] for kind in types]
    interval = reader.optional("full_attention_interval")
    if interval is not None:
        return ["full" if (number + 1) % interval == 0 else "linear" for number in range(count)]
    if reader.optional("sliding_window") is None or reader.values.get("use_sliding_window") is False:
        return ["full"] * count
    pattern = reader.optional("sliding_window_pattern")
    if pattern is not None:
        return ["full" if (number + 1) % pattern == 0 else "sliding" for number in range(count)]
    first_sliding = reader.integer("max_window_layers", default=0)
    return ["sliding" if number >= first_sliding else "full" for number in range(count)]


def _attention(reader: _Config, hidden: int) -> tuple[int, int]:
    """Return FLOPs per token and per pair of softmax attention, grouped-query or latent."""
    heads = reader.integer("num_attention_heads")
    if reader.optional("kv_lora_rank") is not None:
        return _latent_attention(reader, hidden, heads)
    dim = reader.integer("head_dim", default=hidden // heads)
    groups = reader.integer("num_key_value_heads", default=heads)
    queries = 2 if reader.values.get("attn_output_gate") or reader.values.get("model_type") == "qwen3_next" else 1
    projections = 2 * hidden * dim * (queries * heads + 2 * groups) + 2 * heads * dim * hidden
    return projections, 4 * heads * dim


def _latent_attention(reader: _Config, hidden: int, heads: int) -> tuple[int, int]:
    """Return the FLOPs of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    rank, nope, rope = reader.integer("kv_lora_rank"), reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    value = reader.integer("v_head_dim")
    query_rank = reader.optional("q_lora_rank")
    per_head = heads * (nope + rope)
    query = 2 * hidden * per_head if query_rank is None else 2 * query_rank * (hidden + per_head)
    keys_values = 2 * hidden * (rank + rope) + 2 * rank * heads * (nope + value)
    return query + keys_values + 2 * heads * value * hidden, 2 * heads * (nope + rope + value)


def _linear_attention(reader: _Config, hidden: int) -> tuple[int, int]:
    """Return the FLOPs of gated DeltaNet (arXiv 2412.06464): projections, convolution, and three products with the state."""
    key_heads, value_heads = reader.integer("linear_num_key_heads"), reader.integer("linear_num_value_heads")
    key_dim, value_dim = reader.integer("linear_key_head_dim"), reader.integer("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    projections = 2 * hidden * (2 * keys + 2 * values + 2 * value_heads) + 2 * values * hidden
    convolution = 2 * reader.integer("linear_conv_kernel_dim", default=4) * (2 * keys + values)
    state = 6 * value_heads * key_dim * value_dim
    return projections + convolution + state, 0


def _feed_forward(reader: _Config, hidden: int, number: int) -> int:
    """Return FLOPs per token of layer ``number``'s gated MLP, or of its active and shared experts and router."""
    experts = reader.optional("num_experts", "n_routed_experts", "num_local_experts")
    if experts is None or not _is_sparse(reader, number):
        return 6 * hidden * reader.integer("intermediate_size")
    width = reader.integer("moe_intermediate_size", "intermediate_size")
    active = reader.integer("num_experts_per_tok", "moe_topk") * width
    shared = reader.integer("n_shared_experts", default=0) * width
    shared += reader.integer("shared_expert_intermediate_size", default=0)
    gate = 2 * hidden if reader.optional("shared_expert_intermediate_size") else 0
    return 6 * hidden * (active + shared) + 2 * hidden * experts + gate


def _is_sparse(reader: _Config, number: int) -> bool:
    """Tell whether layer ``number`` has experts."""
    if number in (reader.sequence("mlp_only_layers") or []):
        return False
    if number < reader.integer("first_k_dense_replace", default=0):
        return False
    frequency = reader.optional("decoder_sparse_step")
    if frequency is not None:
        return (number + 1) % frequency == 0
    return number % reader.integer("moe_layer_freq", default=1) == 0
