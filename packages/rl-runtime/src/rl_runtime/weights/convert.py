"""Weights between Hugging Face folders and Megatron-Core models.

Invariants: loading sets every parameter of the model, or fails and names what is missing; exporting
gives every Hugging Face tensor exactly once; load then export returns the same bits for every
tensor- and pipeline-parallel size.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_runtime.errors import RuntimeSetupError, TrainerError
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.weights.layouts import (
    FusedGateUp,
    FusedQkv,
    Layout,
    Replicated,
    SplitColumns,
    SplitVocabulary,
)

__all__ = ["export_hf_tensors", "load_hf_weights", "save_hf_folder"]

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"(decoder\.layers\.\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Rule:
    """The origin of one Megatron-Core parameter."""

    layout: Layout
    """How its tensors are laid out over tensor-parallel ranks."""
    hf_names: tuple[str, ...]
    """Hugging Face tensors that it holds, in order; in the table without their layer."""
    exported: bool = True
    """False for the second copy of a tied embedding: it is loaded, never exported."""


def _rules(shape: ModelShape) -> dict[str, _Rule]:
    """List the parameters of dense Llama and Qwen models, those of a layer without its number."""
    one, columns = Replicated(), SplitColumns()
    qkv = FusedQkv(
        num_groups=shape.num_key_value_heads,
        heads_per_group=shape.num_heads // shape.num_key_value_heads,
        head_dim=shape.head_dim,
    )
    vocabulary, tied = SplitVocabulary(shape.vocab_size), shape.tied_embeddings
    weights, biases = (
        tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv") for kind in ("weight", "bias")
    )
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    return {
        "embedding.word_embeddings.weight": _Rule(vocabulary, (_EMBEDDING,)),
        "output_layer.weight": _Rule(
            vocabulary, (_EMBEDDING if tied else "lm_head.weight",), exported=not tied
        ),
        "decoder.final_layernorm.weight": _Rule(one, ("model.norm.weight",)),
        "input_layernorm.weight": _Rule(one, ("input_layernorm.weight",)),
        "self_attention.linear_qkv.weight": _Rule(qkv, weights),
        "self_attention.linear_qkv.bias": _Rule(qkv, biases),
        "self_attention.q_layernorm.weight": _Rule(one, ("self_attn.q_norm.weight",)),
        "self_attention.k_layernorm.weight": _Rule(one, ("self_attn.k_norm.weight",)),
        "self_attention.linear_proj.weight": _Rule(columns, ("self_attn.o_proj.weight",)),
        "pre_mlp_layernorm.weight": _Rule(one, ("post_attention_layernorm.weight",)),
        "mlp.linear_fc1.weight": _Rule(FusedGateUp(), gate_up),
        "mlp.linear_fc2.weight": _Rule(columns, ("mlp.down_proj.weight",)),
    }


def _named_rules(
    model: torch.nn.Module, shape: ModelShape
) -> Iterator[tuple[torch.nn.Parameter, _Rule]]:
    """Yield the parameters of this rank's share, with layers numbered over all stages."""
    rules = _rules(shape)
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        rule = rules.get(match[2] if match else name)
        if rule is None:
            raise RuntimeSetupError(
                f"no Hugging Face tensor is known for the Megatron-Core parameter {name}"
            )
        if match:
            # Names count the layers of one stage from 0, `layer_number` those of all from 1.
            number = int(model.get_submodule(match[1]).layer_number) - 1  # type: ignore[arg-type]
            names = tuple(f"model.layers.{number}.{hf_name}" for hf_name in rule.hf_names)
            rule = replace(rule, hf_names=names)
        yield parameter, rule


@torch.no_grad()
def load_hf_weights(
    model: torch.nn.Module, folder: Path, shape: ModelShape, topology: Topology
) -> None:
    """Set this rank's parameters from a Hugging Face folder.

    Args:
        model: unwrapped GPTModel.
        folder: folder with *.safetensors.
        shape: the model's shape.
        topology: this rank's place.

    Raises:
        RuntimeSetupError: a tensor is missing or has another shape than the config says.
    """
    from safetensors import safe_open

    # Whichever file a tensor is in; a name that two files have comes from the later one.
    paths = sorted(folder.glob("*.safetensors"))
    opened: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
    # A file has keys, and is not iterable.
    files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    if not paths:
        raise RuntimeSetupError(
            f"{folder}: no *.safetensors file; `model.path` names a folder in Hugging Face layout"
        )
    for parameter, rule in _named_rules(model, shape):
        missing = [name for name in rule.hf_names if name not in files]
        if missing:
            raise RuntimeSetupError(
                f"{folder}: no tensor named {missing[0]}; its config.json promises one"
            )
        tensors = [files[name].get_tensor(name) for name in rule.hf_names]
        shard = rule.layout.shard(tensors, topology.tp_rank, topology.tp_size)
        if shard.shape != parameter.shape:
            raise RuntimeSetupError(
                f"{folder}: {', '.join(rule.hf_names)} give {list(shard.shape)} on tensor rank"
                f" {topology.tp_rank}, expected {list(parameter.shape)}"
            )
        parameter.copy_(shard)


@torch.no_grad()
def export_hf_tensors(
    model: torch.nn.Module, shape: ModelShape, topology: Topology
) -> dict[str, torch.Tensor] | None:
    """Collect the whole model on the writer rank, under Hugging Face names. Every rank calls it.

    Args:
        model: unwrapped GPTModel.
        shape: the model's shape.
        topology: this rank's place.

    Returns:
        Full tensors on the CPU on the writer rank, None elsewhere.
    """
    if topology.dp_rank or topology.cp_rank:
        return None
    stage: dict[str, torch.Tensor] = {}
    for parameter, rule in _named_rules(model, shape):
        if rule.exported:
            shards = _over_tensor_ranks(parameter, rule, topology)
            if topology.tp_rank == 0:
                merged = (tensor.cpu() for tensor in rule.layout.merge(shards))
                stage.update(zip(rule.hf_names, merged, strict=True))
    if topology.tp_rank:
        return None
    gathered = _over_stages(stage, topology)
    return dict(sorted(gathered.items())) if topology.is_writer else None


def _over_tensor_ranks(
    parameter: torch.nn.Parameter, rule: _Rule, topology: Topology
) -> list[torch.Tensor]:
    local = parameter.detach()
    if topology.tp_size == 1 or isinstance(rule.layout, Replicated):
        return [local.clone()]
    shards = [torch.empty_like(local) for _ in range(topology.tp_size)]
    dist.all_gather(shards, local.contiguous(), group=topology.tp_group)
    return shards


def _over_stages(stage: dict[str, torch.Tensor], topology: Topology) -> dict[str, torch.Tensor]:
    """Send every stage's tensors to the last one.

    Each stage broadcasts in turn, so that only names travel as objects.
    """
    if topology.pp_size == 1:
        return stage
    gathered = dict(stage) if topology.is_last_stage else {}
    for source in range(topology.pp_size - 1):
        root = dist.get_global_rank(topology.pp_group, source)
        mine = topology.pp_rank == source
        manifest = [
            [(name, tensor.shape, tensor.dtype) for name, tensor in stage.items()] if mine else None
        ]
        dist.broadcast_object_list(
            manifest, src=root, group=topology.pp_group, device=topology.device
        )
        for name, size, dtype in manifest[0] or []:
            buffer = (
                stage[name].to(topology.device)
                if mine
                else torch.empty(size, dtype=dtype, device=topology.device)
            )
            dist.broadcast(buffer, src=root, group=topology.pp_group)
            if topology.is_last_stage:
                gathered[name] = buffer.cpu()
    return gathered


def save_hf_folder(folder: Path, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Write a Hugging Face folder: weights from `tensors`, everything else from `source`.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Args:
        folder: created, or replaced where it is an older export.
        tensors: full tensors by Hugging Face name, on the CPU.
        source: folder with config.json and the tokenizer's files.

    Raises:
        TrainerError: a file could not be read or written; an older export is still there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            # The index names the source's files of weights; the export has one file, without.
            if (
                path.is_file()
                and path.suffix in {".json", ".txt", ".model", ".jinja"}
                and path.name != "model.safetensors.index.json"
            ):
                shutil.copy2(path, temporary / path.name)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            temporary / "model.safetensors",
            metadata={"format": "pt"},
        )
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"the model folder {folder} could not be written: {error}") from error
