"""Weights between Hugging Face folders and Megatron-Core models.

Invariants: loading sets every parameter of the model, or fails and names what is missing; exporting
gives every Hugging Face tensor exactly once; load then export returns the same bits for every
tensor- and pipeline-parallel size.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_runtime.errors import RuntimeSetupError, TrainerError
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.weights.layouts import (
    FusedGateUp,
    FusedQkv,
    Layout,
    Replicated,
    SplitColumns,
    SplitVocabulary,
)

__all__ = ["Rule", "export_hf_tensors", "load_hf_weights", "parameter_rule", "save_hf_folder"]

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Where one Megatron-Core parameter comes from."""

    hf_names: tuple[str, ...]
    """Hugging Face tensors that it holds, in order."""
    layout: Layout
    """How they are laid out over tensor-parallel ranks."""
    exported: bool = True
    """False for the second copy of a tied embedding: it is loaded, never exported."""


def parameter_rule(name: str, shape: ModelShape) -> Rule:
    """Say where a parameter comes from.

    Args:
        name: Megatron-Core's name, with the layer's number in the whole model.
        shape: the model's shape.

    Returns:
        The rule. "decoder.layers.3.mlp.linear_fc1.weight" holds layer 3's gate_proj and up_proj.

    Raises:
        RuntimeSetupError: a parameter that dense Llama and Qwen models do not have.
    """
    vocabulary = SplitVocabulary(shape.vocab_size)
    if name == "embedding.word_embeddings.weight":
        return Rule(hf_names=(_EMBEDDING,), layout=vocabulary)
    if name == "output_layer.weight":
        tied = shape.tied_embeddings
        return Rule(
            hf_names=(_EMBEDDING if tied else "lm_head.weight",),
            layout=vocabulary,
            exported=not tied,
        )
    if name == "decoder.final_layernorm.weight":
        return Rule(hf_names=("model.norm.weight",), layout=Replicated())
    match = _LAYER.fullmatch(name)
    rule = _layer_rules(shape).get(match[2]) if match else None
    if match is None or rule is None:
        raise RuntimeSetupError(
            f"no Hugging Face tensor is known for the Megatron-Core parameter {name}"
        )
    hf_names, layout = rule
    return Rule(
        hf_names=tuple(f"model.layers.{match[1]}.{hf_name}" for hf_name in hf_names), layout=layout
    )


def _layer_rules(shape: ModelShape) -> dict[str, tuple[tuple[str, ...], Layout]]:
    qkv = FusedQkv.of(shape)
    return {
        "input_layernorm.weight": (("input_layernorm.weight",), Replicated()),
        "self_attention.linear_qkv.weight": (
            tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
            qkv,
        ),
        "self_attention.linear_qkv.bias": (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), qkv),
        "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Replicated()),
        "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Replicated()),
        "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), SplitColumns()),
        "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Replicated()),
        "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), FusedGateUp()),
        "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), SplitColumns()),
    }


def _named_rules(
    model: torch.nn.Module, shape: ModelShape
) -> Iterator[tuple[torch.nn.Parameter, Rule]]:
    """Parameters of this rank's part of a model, with layers numbered over all pipeline stages."""
    layers = model.get_submodule("decoder.layers")
    numbers = {
        str(index): str(int(layer.layer_number) - 1)  # type: ignore[arg-type]
        for index, layer in enumerate(layers.children())
    }
    for name, parameter in model.named_parameters():
        whole = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: numbers[match[0]], name)
        yield parameter, parameter_rule(whole, shape)


class _SafetensorsFolder:
    """Reads single tensors of a Hugging Face folder, whichever file they are in."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise RuntimeSetupError(
                f"{folder}: no *.safetensors file; `model.path` names a folder in Hugging Face"
                " layout"
            )
        files: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
        self._files = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - a file is not iterable

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise RuntimeSetupError(
                f"{self._folder}: no tensor named {name}; its config.json promises one"
            )
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


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
    tensors = _SafetensorsFolder(folder)
    for parameter, rule in _named_rules(model, shape):
        shard = rule.layout.shard(
            [tensors[name] for name in rule.hf_names], topology.tp_rank, topology.tp_size
        )
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
        if not rule.exported:
            continue
        shards = _over_tensor_ranks(parameter, rule, topology)
        if topology.tp_rank == 0:
            stage.update(
                zip(
                    rule.hf_names,
                    (tensor.cpu() for tensor in rule.layout.merge(shards)),
                    strict=True,
                )
            )
    if topology.tp_rank:
        return None
    gathered = _over_stages(stage, topology)
    if not topology.is_writer:
        return None
    return dict(sorted(gathered.items()))


def _over_tensor_ranks(
    parameter: torch.nn.Parameter, rule: Rule, topology: Topology
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
    """Write a Hugging Face folder: weights from `tensors`, everything else from the folder that the
    model came from.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Args:
        folder: created, or replaced where it is an older export.
        tensors: full tensors by Hugging Face name, on the CPU.
        source: folder with config.json and the tokenizer's files.

    Raises:
        TrainerError: a file could not be read or written; an older export is still there.
    """
    from safetensors import SafetensorError

    try:
        _write_hf_folder(folder, tensors, source)
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"the model folder {folder} could not be written: {error}") from error


def _write_hf_folder(folder: Path, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    from safetensors.torch import save_file

    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in sorted(source.iterdir()):
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
