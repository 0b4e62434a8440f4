"""`rl-runtime replay`: compute one dumped micro-batch again, and say how far it is off."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rl_runtime.cli.endings import FAILED, USAGE, end
from rl_runtime.errors import ReplayError, RuntimeSetupError

__all__ = ["replay"]


def replay(
    file: Annotated[
        Path, typer.Argument(help="One micro-batch, from `rl-dump replay TRAIN_DUMP FILE`.")
    ],
    model: Annotated[
        Path,
        typer.Option(
            help=(
                "Hugging Face folder of the weights that the batch began with; for batch 0 the"
                " run's warm_start."
            )
        ),
    ],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference that is accepted, nats.")
    ] = 1e-5,
) -> None:
    """Run one dumped micro-batch again, on the CPU.

    Exits 1 when a log-prob differs by more than the tolerance.
    """
    # Before torch is loaded: this runs on the CPU, also beside a training run that has the GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # What libraries have to say about missing GPUs is not what was asked for.
    logging.basicConfig(handlers=[logging.NullHandler()])
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from rl_dump import DumpError, UnsupportedContractError
    from rl_runtime.stages.replay import replay as replay_micro_batch

    try:
        given, found = replay_micro_batch(file, model)
    except (DumpError, UnsupportedContractError, ReplayError, RuntimeSetupError) as error:
        end(USAGE, f"error: {error}")
    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid("", "", padding=(0, 2))
    table.add_row(
        "micro-batch",
        f"batch {given.batch_id}, step {given.step}, rank {given.data_parallel_rank}, micro-batch"
        f" {given.micro_batch}",
    )
    table.add_row("compared", f"{found.num_samples} samples, {found.num_tokens} tokens")
    table.add_row("largest difference", f"{found.largest:.1e} nats")
    if found.token is not None:
        table.add_row("where", f"rollout position {found.rollout_position}, token {found.token}")
        table.add_row("log-prob", f"{found.dumped:.7f} dumped, {found.replayed:.7f} replayed")
    console.print(table)
    if found.largest > tolerance:
        console.print(
            f"a log-prob differs by more than {tolerance:g}: other weights than the batch began"
            " with, or other code",
            markup=False,
        )
        end(FAILED)
