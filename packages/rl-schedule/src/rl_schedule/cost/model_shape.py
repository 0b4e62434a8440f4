"""The attention and the MLP of each layer, and their FLOPs, out of a Hugging Face config.

Covers dense Llama-shaped models (Llama, Mistral, Qwen2, Qwen3, Gemma), mixture of experts (Mixtral,
Qwen2/3-MoE, gpt-oss, DeepSeek), multi-head latent attention (DeepSeek-V2/V3), sliding windows
(`layer_types`, `sliding_window_pattern`, `max_window_layers`) and hybrid linear attention
(Qwen3-Next, `full_attention_interval`).

Invariants: a model type that is not in the table is an error, and so is a key that stands for other
layers; a number that is needed and missing is an error, never a guess; what the configs themselves
leave to a default (`head_dim`, `num_key_value_heads`) follows that default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_schedule.errors import ScheduleError

__all__ = ["KNOWN_MODEL_TYPES", "LayerShape", "ModelShape", "read_model_shape"]

_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "linear"}

_TWO_MATRIX_MLPS = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose MLP has no gate: two matrices of hidden x intermediate instead of three."""

_GATED_QUERIES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types whose full-attention query projection also makes an output gate, twice as wide."""


_DENSE = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "seed_oss", "exaone4"),
    *("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "granite", "glm", "glm4"),
    *("cohere", "cohere2", "stablelm", "hunyuan_v1_dense", *sorted(_TWO_MATRIX_MLPS)),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"),
)
_SPARSE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "gpt_oss", "olmoe", "granitemoe"),
    *("glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2"),
)
_HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

KNOWN_MODEL_TYPES = frozenset({*_DENSE, *_SPARSE, *_HYBRID})
"""Model types whose layers are the ones computed here; any other is refused."""

_OTHER_LAYERS = (
    *("hybrid_override_pattern", "layers_block_type", "attn_type_list", "attn_layer_period"),
    *(
        "attn_layer_indices",
        "index_topk",
        "attention_chunk_size",
        "mamba_d_state",
        "ssm_state_size",
    ),
    *("linear_attn_config", "conv_L_cache", "kv_sharing_layers", "mamba_num_heads"),
)
"""Keys of models with layers not computed here: state space, chunked or sparse attention."""


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
    """A config whose missing numbers are remembered, so that all of them are reported at once."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.missing: list[str] = []

    def required(self, *names: str) -> int:
        """Return the first of `names` that is an integer >= 1, else 1, and remember that."""
        value = self.optional(*names)
        if value is None:
            self.missing.append(" or ".join(names))
            return 1
        return value

    def optional(self, *names: str) -> int | None:
        """Return the first of `names` that is an integer >= 1, or None."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                return value
        return None

    def sequence(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        return list(value) if isinstance(value, (list, tuple)) else None

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a `config.json`; a nested `text_config` (vision-language models) is followed.

    Raises:
        ScheduleError: a model type that is not in `KNOWN_MODEL_TYPES` or a key of other layers;
            numbers the shape needs are missing (all are named); `layer_types` has an unknown kind.
    """
    if not isinstance(config, Mapping):
        raise ScheduleError(
            f"an HF config is a dictionary, got {type(config).__name__}; pass json.load of"
            " config.json"
        )
    nested = config.get("text_config")
    reader = _Config(nested if isinstance(nested, Mapping) else config)
    _refuse_other_layers(reader)
    hidden = reader.required("hidden_size")
    window = reader.optional("sliding_window")
    layers = []
    for number, kind in enumerate(_attention_kinds(reader)):
        token_flops, pair_flops = (
            _linear_attention(reader, hidden) if kind == "linear" else _attention(reader, hidden)
        )
        layers.append(
            LayerShape(
                token_flops=token_flops + _feed_forward(reader, hidden, number),
                pair_flops=pair_flops,
                window=window if kind == "sliding" else None,
            )
        )
    shape = ModelShape(layers=tuple(layers), head_flops=2 * hidden * reader.required("vocab_size"))
    if reader.missing:
        raise ScheduleError(
            f"the config of model_type {reader.model_type!r} lacks"
            f" {', '.join(dict.fromkeys(reader.missing))}; TransformerCost cannot be derived"
            " from it"
        )
    return shape


def _refuse_other_layers(reader: _Config) -> None:
    """Refuse a model whose layers are not the ones computed here."""
    known = reader.values.get("model_type")
    keys = [name for name in _OTHER_LAYERS if reader.values.get(name) is not None]
    if isinstance(known, str) and known in KNOWN_MODEL_TYPES and not keys:
        return
    why = f" with {', '.join(keys)}, which stand for layers" if keys else ", whose layers are ones"
    raise ScheduleError(
        f"the config has model_type {known!r}{why} that TransformerCost does not know; it knows"
        f" {', '.join(sorted(KNOWN_MODEL_TYPES))}. Give a cost function of your own, or, if the"
        " layers are those of one of these, its model_type"
    )


def _attention_kinds(reader: _Config) -> list[str]:
    """Return `full`, `sliding` or `linear` for each layer."""
    count = reader.required("num_hidden_layers")
    types = reader.sequence("layer_types")
    if types is not None:
        unknown = sorted({str(kind) for kind in types} - _KINDS.keys())
        if unknown or len(types) != count:
            raise ScheduleError(
                f"layer_types has {len(types)} entries for {count} layers; kinds are"
                f" {', '.join(_KINDS)}, unknown here: {unknown or 'none'}"
            )
        return [_KINDS[kind] for kind in types]
    interval = reader.optional("full_attention_interval")
    if interval is not None:
        return ["linear" if (number + 1) % interval else "full" for number in range(count)]
    if (
        reader.optional("sliding_window") is None
        or reader.values.get("use_sliding_window") is False
    ):
        return ["full"] * count
    pattern = reader.optional("sliding_window_pattern") or (
        2 if reader.model_type == "gemma2" else None
    )
    if pattern is not None:
        return ["sliding" if (number + 1) % pattern else "full" for number in range(count)]
    first_sliding = reader.optional("max_window_layers") or 0
    return ["sliding" if number >= first_sliding else "full" for number in range(count)]


def _attention(reader: _Config, hidden: int) -> tuple[int, int]:
    """Return FLOPs per token and per pair of softmax attention.

    Grouped queries, H hidden, h heads, g key-value heads, d head size: query 2Hhd, key and value
    4Hgd, output 2hdH (not 2H^2: h * d != H in Qwen3); a pair costs 2d for its score and 2d for its
    value in each head.
    """
    heads = reader.required("num_attention_heads")
    if reader.optional("kv_lora_rank") is not None:
        return _latent_attention(reader, hidden, heads)
    size = reader.optional("head_dim") or hidden // heads
    groups = reader.optional("num_key_value_heads") or heads
    gated = bool(reader.values.get("attn_output_gate")) or reader.model_type in _GATED_QUERIES
    query = 2 * hidden * heads * size * (2 if gated else 1)
    return query + 4 * hidden * groups * size + 2 * heads * size * hidden, 4 * heads * size


def _latent_attention(reader: _Config, hidden: int, heads: int) -> tuple[int, int]:
    """Return FLOPs per token and per pair of multi-head latent attention.

    DeepSeek-V2, arXiv 2405.04434, section 2.1. Query down to its rank and up to h (n + r), or
    straight up without a rank; key-value down to rank c plus r, and up to h (n + v); output 2hvH; a
    pair costs 2 (n + r) for its score and 2v for its value in each head.
    """
    rank, nope, rope = map(
        reader.required, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    value = reader.required("v_head_dim")
    query_rank = reader.optional("q_lora_rank")
    per_head = heads * (nope + rope)
    query = 2 * hidden * per_head if query_rank is None else 2 * query_rank * (hidden + per_head)
    keys_values = 2 * hidden * (rank + rope) + 2 * rank * heads * (nope + value)
    return query + keys_values + 2 * heads * value * hidden, 2 * heads * (nope + rope + value)


def _linear_attention(reader: _Config, hidden: int) -> tuple[int, int]:
    """Return FLOPs per token of gated DeltaNet (arXiv 2412.06464), and 0 per pair.

    k key heads of a, v value heads of b: projections to query, key, value, gate and two scalars per
    value head; a short convolution over query, key and value; three products with the v states of a
    x b (read, write, query); output.
    """
    key_heads, value_heads, key_size, value_size = map(
        reader.required,
        (
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ),
    )
    keys, values = key_heads * key_size, value_heads * value_size
    projections = 2 * hidden * (2 * keys + 2 * values + 2 * value_heads) + 2 * values * hidden
    convolution = 2 * reader.required("linear_conv_kernel_dim") * (2 * keys + values)
    return projections + convolution + 6 * value_heads * key_size * value_size, 0


def _feed_forward(reader: _Config, hidden: int, number: int) -> int:
    """Return FLOPs per token of a layer's MLP (6HF with a gate), or of its active experts."""
    experts = reader.optional("num_experts", "n_routed_experts", "num_local_experts")
    if experts is None or not _is_sparse(reader, number):
        return (
            (4 if reader.model_type in _TWO_MATRIX_MLPS else 6)
            * hidden
            * reader.required("intermediate_size")
        )
    width = reader.required("moe_intermediate_size", "intermediate_size")
    active = reader.required("num_experts_per_tok", "experts_per_token") * width
    shared = (reader.optional("n_shared_experts") or 0) * width
    gated_expert = reader.optional("shared_expert_intermediate_size") or 0
    router = 2 * hidden * (experts + (1 if gated_expert else 0))
    return 6 * hidden * (active + shared + gated_expert) + router


def _is_sparse(reader: _Config, number: int) -> bool:
    """Tell whether layer `number` has experts."""
    if number in (reader.sequence("mlp_only_layers") or []) or number < (
        reader.optional("first_k_dense_replace") or 0
    ):
        return False
    step = reader.optional("decoder_sparse_step")
    if step is not None:
        return (number + 1) % step == 0
    return number % (reader.optional("moe_layer_freq") or 1) == 0
