"""Let Megatron-Core 0.19.2 train without a GPU.

Megatron-Core names CUDA directly in its train step (`torch.cuda.current_device()`, `device="cuda"`,
`torch.cuda.synchronize()`), in its pipeline transport and in its optimizer. The shim replaces the
module-level name `torch`, in the modules that do so, by a proxy that answers for the CPU, and
replaces three functions: one insists on CUDA gradients, two read and set CUDA's random state, which
nothing draws from. `torch` itself stays as it is.

Invariants: nothing is installed where a GPU is present; a module that the shim does not know is
never touched; installing twice does nothing; another Megatron-Core version than the tested one is
refused, because the shim names internals.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rl_runtime.errors import RuntimeSetupError

__all__ = ["TESTED_MEGATRON_VERSION", "cpu_construction", "install_cpu_shim"]

TESTED_MEGATRON_VERSION = "0.19.2"

_CPU = torch.device("cpu")
_MODULES = (
    "megatron.core.utils",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
)
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_log = logging.getLogger(__name__)


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand in for what has no meaning on a CPU."""


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


class _Proxy:
    """A module with some answers of its own; all others are the real one's."""

    def __init__(self, module: Any, answers: Mapping[str, Any]) -> None:
        self.__dict__.update(answers)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_TORCH_OF_CPU = _Proxy(
    torch,
    {
        # What a train step asks of a device.
        "cuda": _Proxy(
            torch.cuda,
            {
                "current_device": lambda: _CPU,
                "synchronize": _nothing,
                "current_stream": _nothing,
            },
        ),
        **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES},
    },
)


def _clip_grads_by_total_norm(
    parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    """Scale gradients by min(1, max_norm / (total_norm + 1e-6)), as Megatron-Core does on CUDA."""
    if use_decoupled_grad:
        raise RuntimeSetupError(
            "the CPU optimizer has no decoupled gradients: leave"
            " `use_precision_aware_optimizer` off"
        )
    coefficient = max_norm / (float(total_norm) + 1e-6)
    if coefficient >= 1.0:
        return  # Multiplying by 1 would touch every gradient for nothing.
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)


def install_cpu_shim() -> bool:
    """Install the shim where there is no GPU, and say so in the log.

    Returns:
        Whether the shim is in place: False on a machine with a GPU.

    Raises:
        RuntimeSetupError: no GPU, and another Megatron-Core version than the tested one.
    """
    if torch.cuda.is_available():
        return False
    found = importlib.metadata.version("megatron-core")
    if found != TESTED_MEGATRON_VERSION:
        raise RuntimeSetupError(
            f"training without a GPU is tested with megatron-core {TESTED_MEGATRON_VERSION}, found"
            f" {found}: install the tested version, or train on a GPU"
        )
    modules: list[Any] = [importlib.import_module(name) for name in _MODULES]
    if all(module.torch is _TORCH_OF_CPU for module in modules):
        return True
    for module in modules:
        module.torch = _TORCH_OF_CPU
    optimizer_module: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    optimizer_module.clip_grad_by_total_norm_fp32 = _clip_grads_by_total_norm
    random_module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random_module._get_cuda_rng_state = _no_rng_state  # noqa: SLF001 - the name is Megatron-Core's
    random_module._set_cuda_rng_state = _nothing  # noqa: SLF001 - as above
    tracker_name = random_module._MODEL_PARALLEL_RNG_TRACKER_NAME  # noqa: SLF001 - as above
    # Sequence parallelism forks a stream of this name; there is no dropout, so nothing is drawn
    # from it.
    random_module.get_cuda_rng_tracker().set_states({tracker_name: _no_rng_state()})
    _log.warning(
        "no GPU: Megatron-Core %s runs on the CPU through a shim (%d modules)",
        TESTED_MEGATRON_VERSION,
        len(modules),
    )
    return True


def _no_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _stay(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def cpu_construction() -> Iterator[None]:
    """Keep `Tensor.cuda()` from leaving the CPU while a model is built.

    Megatron-Core calls it on tied embeddings of a pipeline. With a GPU, nothing is changed.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.cuda
    torch.Tensor.cuda = _stay  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]
