"""The policy and how it learns: `model`, `train`, `parallel`, `optimizer`, `warm_start`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_runtime.config.base import Section

__all__ = [
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "TrainSection",
    "WarmStartSection",
]


class ModelSection(Section):
    """The policy: a folder in Hugging Face layout, or the shape of a small Qwen3 model.

    The run makes the small model and its warm start itself.
    """

    path: str = ""
    """Folder with config.json, *.safetensors and a tokenizer.

    Empty: make a small model of the shape below, and begin with a warm start.
    """

    reference_path: str = ""
    """Folder of the reference policy for the KL term.

    Empty: the policy before the first batch. Read only when `algorithm.kl_coef` > 0.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations, in the trainer and in the engine. bfloat16 needs a GPU."""

    num_layers: int = Field(default=4, ge=1)
    """Transformer layers of the small model."""

    hidden_size: int = Field(default=192, ge=8)
    """Width of the small model's residual stream."""

    num_attention_heads: int = Field(default=6, ge=1)
    """Query heads of the small model."""

    num_key_value_heads: int = Field(default=2, ge=1)
    """Key and value heads of the small model (grouped-query attention)."""

    head_dim: int = Field(default=32, ge=2)
    """Width of one attention head of the small model."""

    intermediate_size: int = Field(default=512, ge=8)
    """Width of the small model's SwiGLU layer."""

    max_position_embeddings: int = Field(default=512, ge=16)
    """Longest sequence of the small model, in tokens."""


class TrainSection(Section):
    """How many batches are trained on, and how each is cut into steps and micro-batches."""

    num_batches: int = Field(default=30, ge=0)
    """Rollout batches of the run. 0: the warm start alone, one evaluation, a saved model."""

    global_batch_size: int = Field(default=128, ge=1)
    """Rollouts of one optimizer step. Counted in rollouts, whatever the number of samples."""

    max_tokens_per_gpu: int = Field(default=4096, ge=1)
    """Tokens that one rank holds in one micro-batch.

    Times `parallel.context` it is the token cap.
    """

    balance: Literal["none", "tokens", "flops"] = "flops"
    """What the planner balances over ranks and slots."""

    extra_micro_batches: Literal["auto", 0] = "auto"
    """Micro-batches that each rank may run beyond the fewest that hold a step's tokens.

    auto: at most one per rank and step, only where the costliest rank would end more than 0.15 %
    above the mean without it, as with heavy-tailed lengths. 0: none.
    """

    on_oversized: Literal["alone", "error", "drop"] = "alone"
    """What happens to a sample longer than the token cap."""

    on_trailing: Literal["drop", "partial_step", "error"] = "drop"
    """What happens to rollouts that do not fill a last step.

    drop: they are left out; a batch that lost so many rollouts that it does not fill one step is
    trained as one smaller step.
    """


class ParallelSection(Section):
    """Sizes of the trainer's mesh. The number of trainer ranks is their product."""

    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel ranks."""

    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages."""

    context: int = Field(default=1, ge=1)
    """Context-parallel ranks (zigzag layout)."""

    data: int = Field(default=2, ge=1)
    """Data-parallel ranks, without context parallelism."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks: the product of all axes."""
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerSection(Section):
    """Megatron-Core's Adam and its learning-rate schedule, one rate per batch."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""

    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a fraction of `lr`; linear in between."""

    warmup_batches: int = Field(default=3, ge=0)
    """Batches over which the learning rate rises linearly from 0."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Term added to the denominator."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""

    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm. 0: no clipping."""


class WarmStartSection(Section):
    """The warm start: supervised fine-tuning of the small model, by the same trainers.

    Skipped when `model.path` is set.
    """

    steps: int = Field(default=60, ge=0)
    """Most optimizer steps."""

    stop_at_reward: float = Field(default=0.55, ge=0, le=1)
    """Stop as soon as the held-out reward reaches this value. 1: run all steps."""

    first_check: int = Field(default=30, ge=0)
    """Steps before the held-out reward is looked at for the first time."""

    check_interval: int = Field(default=3, ge=1)
    """Steps between two looks."""

    check_samples: int = Field(default=128, ge=1)
    """Held-out prompts of one look. They are not those of `[eval]`."""

    batch_size: int = Field(default=64, ge=1)
    """Examples of one step."""

    lr: float = Field(default=2e-3, gt=0)
    """Learning rate after the warm-up."""

    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
