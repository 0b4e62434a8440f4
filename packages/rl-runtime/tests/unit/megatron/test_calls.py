"""What the protocols say of Megatron-Core is so in the version that is installed."""

import inspect
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer as RealOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_runtime.megatron import calls


def _names(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize(
    "function",
    [
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_without_interleaving,
    ],
)
def test_forward_backward_functions_take_what_we_give(function: Any) -> None:
    assert _names(calls.ForwardBackward.__call__) <= _names(function)


def test_the_model_takes_what_we_give_in_the_same_order() -> None:
    ours = _names(calls.GptForward.__call__)
    assert ours <= _names(GPTModel.forward)
    assert list(inspect.signature(GPTModel.forward).parameters)[1:4] == [
        "input_ids",
        "position_ids",
        "attention_mask",
    ]


def test_the_optimizer_and_the_config_have_what_we_ask_for() -> None:
    for name, member in vars(calls.MegatronOptimizer).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert _names(member) <= _names(getattr(RealOptimizer, name)), name
    assert set(calls.ModelConfig.__annotations__) <= set(TransformerConfig.__dataclass_fields__)
    assert "sequence_parallel" in inspect.getsource(ColumnParallelLinear.__init__)
