"""The model that `gpu_megatron_step.py` times, with norms that can be compiled, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_runtime.megatron import attention
from rl_runtime.megatron.cpu_shim import cpu_construction
from rl_runtime.megatron.rotary import rotary_frequencies
from rl_runtime.megatron.shape import ModelShape

QWEN3_06B = ModelShape(
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151_936,
    max_positions=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling_factor=None,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
)
TINY = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=1_000,
    max_positions=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling_factor=None,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class RmsNorm(torch.nn.RMSNorm):
    """A norm with the constructor that Megatron-Core calls."""

    compute: Callable[..., torch.Tensor] = staticmethod(rms_norm)

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        del config
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One packed micro-batch on the device."""

    tokens_1T: torch.Tensor
    positions_1T: torch.Tensor
    targets_K: torch.Tensor
    stream: attention.PackedStream


def build(
    shape: ModelShape, device: torch.device, *, fused: bool
) -> tuple[Any, Any, TransformerConfig]:
    """Return the model in its data-parallel wrapper, its optimizer and its config."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        finalize_model_grads_func=finalize_model_grads,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    inside = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    inside.core_attention = attention.PackedAttention
    inside.q_layernorm = inside.k_layernorm = RmsNorm
    with cpu_construction():
        model = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * shape.num_layers, layer_norm=RmsNorm
            ),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",
        ).to(device, dtype)
    on_gpu = device.type == "cuda"
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu),
        Float16Module(config, model) if config.bf16 else model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-6,
        clip_grad=1.0,
        bf16=config.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=on_gpu,
    )
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["fused"] = on_gpu  # torch's own fused Adam, which Megatron-Core does not ask for
    return wrapped, optimizer, config


def packed_batch(
    shape: ModelShape, lengths: list[int], targets_K: torch.Tensor, device: torch.device
) -> Batch:
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(
        device
    )
    stream = attention.pack_stream(
        lengths,
        positions,
        rotary_frequencies(shape).to(device),
        cp_size=1,
        cp_rank=0,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    tokens = torch.randint(0, shape.vocab_size, (1, positions.numel()), device=device)
    return Batch(tokens_1T=tokens, positions_1T=positions[None], targets_K=targets_K, stream=stream)
