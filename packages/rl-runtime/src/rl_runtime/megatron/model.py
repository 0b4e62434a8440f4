"""Build a Megatron-Core GPT model from a shape and a recipe.

The local layer spec with our packed attention and RMS norm runs on the CPU and on GPUs alike.
Rotary embeddings are part of the packed attention, so Megatron-Core's own are off.

Invariants: settings that the trainer depends on (sizes, parallel axes, loss normalisation) cannot
be changed through `[megatron]`; an unknown field there is an error; dropout is 0, so that a forward
pass repeats exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_metrics import calculates_per_token_loss
from rl_runtime.config.library_options import unknown_names
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.megatron.attention import PackedAttention
from rl_runtime.megatron.calls import ModelConfig
from rl_runtime.megatron.cpu_shim import cpu_construction
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.megatron.shape import ModelShape, mesh_problems

__all__ = ["RmsNorm", "build_model", "megatron_config", "wrap_for_training"]


class RmsNorm(torch.nn.RMSNorm):
    """RMS norm for the local spec.

    Under sequence parallelism its gradient is summed over tensor-parallel ranks.
    """

    def __init__(
        self, config: ModelConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        """Take what Megatron-Core gives to a norm."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def megatron_config(shape: ModelShape, recipe: Recipe) -> ModelConfig:
    """Translate shape and recipe to Megatron-Core's config.

    Args:
        shape: the model's shape.
        recipe: `[parallel]`, `model.dtype`, `algorithm.loss_aggregation` and, passed through,
            `[megatron]` are used.

    Returns:
        The config.

    Raises:
        ConfigError: `[megatron]` has an unknown field, or one that another section decides; or an
            axis does not divide the model.
    """
    dtype = getattr(torch, recipe.model.dtype)
    decided = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate_size,
        "layernorm_epsilon": shape.rms_norm_eps,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": recipe.parallel.tensor,
        "pipeline_model_parallel_size": recipe.parallel.pipeline,
        "context_parallel_size": recipe.parallel.context,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": calculates_per_token_loss(recipe.algorithm.loss_aggregation),
        # Micro-batches differ in length, and Megatron-Core couples that to a token dispatcher even
        # without experts.
        "variable_seq_lengths": recipe.parallel.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "finalize_model_grads_func": finalize_model_grads,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
        # Both concern Megatron-Core's own output layer, in whose place `training.scores` scores.
        "use_mup": False,
        "defer_embedding_wgrad_compute": False,
    }
    problems = [
        *mesh_problems(shape, recipe),
        *(
            f"megatron.{name}: is decided by the other sections or by the model; remove it"
            for name in recipe.megatron
            if name in decided
        ),
        *unknown_names(megatron=recipe.megatron, sglang={}),
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    config: ModelConfig = TransformerConfig(**{**decided, **recipe.megatron})
    return config


def build_model(shape: ModelShape, config: ModelConfig, topology: Topology) -> torch.nn.Module:
    """Build this rank's share of the model, with weights not yet set.

    Args:
        shape: the model's shape.
        config: Megatron-Core's config.
        topology: this rank's place.

    Returns:
        A GPTModel on this rank's device, in the config's dtype.
    """
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    block = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RmsNorm
    )
    with cpu_construction():
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            # Rounded up to what tensor ranks divide; the extra rows are never scored.
            vocab_size=-(-shape.vocab_size // topology.tp_size) * topology.tp_size,
            max_sequence_length=shape.max_positions,
            pre_process=topology.pp_rank == 0,
            post_process=topology.is_last_stage,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",
        )
    placed: torch.nn.Module = model.to(topology.device, config.params_dtype)
    return placed


def wrap_for_training(model: torch.nn.Module, config: ModelConfig) -> torch.nn.Module:
    """Wrap a model in Megatron-Core's data parallelism.

    Gradients are accumulated and reduced in float32.
    """
    inner = Float16Module(config, model) if config.bf16 else model
    wrapped: torch.nn.Module = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner
    )
    return wrapped
