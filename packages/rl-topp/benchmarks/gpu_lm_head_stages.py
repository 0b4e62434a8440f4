"""The kernels of gpu_lm_head.py alone, with the bandwidth each reaches, and other tile sizes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_lm_head_timing import DEVICE, FIGURES, SHAPES, milliseconds, say
from lm_head_cases import operands, targets_in, zipf_rows

from rl_topp.lm_head import triton_entries, triton_gradients
from rl_topp.lm_head.triton_entries import KernelShapes
from rl_topp.torch.upload import UploadedRows, upload_rows


class Stages:
    """The kernels at the large shape, and the bytes each must move at least: every array once."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        num_rows, vocab_size, width = SHAPES["large"]
        self.rows = zipf_rows(rng, num_rows, 5.0)
        self.hidden, self.weight = (
            operand.detach() for operand in operands(num_rows, vocab_size, width)
        )
        self.targets = targets_in(self.rows, rng)
        self.lists = self.upload()
        self.ids_E, self.rows_E = self.list_entries()
        self.z_E = self.scores(KernelShapes())
        self.row = torch.randn(num_rows, device=DEVICE)
        self.coefficients_E = torch.randn(self.ids_E.numel(), device=DEVICE) * (self.ids_E >= 0)
        self.statistics_4T = torch.zeros(4, num_rows, device=DEVICE)
        self.for_hidden, self.for_weight = (
            torch.zeros_like(self.hidden),
            torch.zeros_like(self.weight),
        )
        used, hidden_bytes = (
            float(torch.unique(self.ids_E).numel()) * width * 2,
            float(self.hidden.numel()) * 2,
        )
        self.least = {
            "scores": used + hidden_bytes,
            "d_hidden": used + 2 * hidden_bytes,
            "d_weight": 2 * used + hidden_bytes,
        }
        self.least["zero d_weight"] = float(self.weight.numel()) * 2

    def upload(self) -> UploadedRows:
        return upload_rows(self.rows, np.arange(len(self.rows)), DEVICE)

    def list_entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_entries.list_entries(
            self.lists, self.targets, vocab_start=0, num_local_ids=self.weight.shape[0]
        )

    def scores(self, shapes: KernelShapes) -> torch.Tensor:
        return triton_entries.entry_scores(
            self.hidden, self.weight, self.ids_E, self.rows_E, dtype=torch.float32, shapes=shapes
        )

    def row_statistics(self) -> None:
        triton_entries.row_statistics(
            self.z_E, self.lists.rows_R, self.lists.offsets_R1, self.statistics_4T
        )

    def coefficients(self) -> None:
        triton_entries.entry_coefficients(
            self.z_E,
            self.ids_E,
            self.lists.rows_R,
            self.lists.offsets_R1,
            self.row,
            None,
            self.row,
            self.row,
        )

    def d_hidden(self, shapes: KernelShapes) -> None:
        lists = self.ids_E, self.coefficients_E, self.lists.rows_R, self.lists.offsets_R1
        triton_gradients.hidden_gradient(self.weight, *lists, self.for_hidden, shapes=shapes)

    def d_weight(self, shapes: KernelShapes) -> None:
        triton_gradients.weight_gradient(
            self.hidden,
            self.ids_E,
            self.rows_E,
            self.coefficients_E,
            self.for_weight,
            shapes=shapes,
        )

    def calls(self, shapes: KernelShapes) -> dict[str, Callable[[], Any]]:
        return {
            "upload": self.upload,
            "list entries": self.list_entries,
            "scores": lambda: self.scores(shapes),
            "row statistics": self.row_statistics,
            "coefficients": self.coefficients,
            "d_hidden": lambda: self.d_hidden(shapes),
            "zero d_weight": lambda: torch.zeros_like(self.weight),
            "sort": lambda: torch.sort(self.ids_E, stable=True),
            "d_weight": lambda: self.d_weight(shapes),
        }


def copy_rate() -> float:
    """Return bytes read and written per second by a large device-to-device copy."""
    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    return 8 * 2**30 / (1e-3 * milliseconds(lambda: target.copy_(source)))


def stages() -> None:
    say(f"copy: {copy_rate() / 1e12:.2f} TB/s read + written", short=True)
    found = Stages()
    for name, call in found.calls(KernelShapes()).items():
        took = milliseconds(call)
        rate = (
            f", {found.least[name] / took / 1e9:.2f} TB/s of the least traffic"
            if name in found.least
            else ""
        )
        say(f"  {name:15s} {took:7.3f} ms{rate}", short=True)
        FIGURES[f"stage {name}"] = took


def tune() -> None:
    grid: list[tuple[str, dict[str, int]]] = []
    grid += [
        ("scores", {"score_entries": e, "score_block": b})
        for e in (2, 4, 8)
        for b in (128, 256, 512)
    ]
    grid += [
        ("d_hidden", {"hidden_entries": e, "hidden_block": b})
        for e in (1, 2, 4)
        for b in (512, 1024, 2048)
    ]
    grid += [
        ("d_weight", {"weight_entries": e, "weight_block": b, "weight_span": s, "chunk": 64})
        for e in (1, 2, 4)
        for b in (512, 1024, 2048)
        for s in (1, 4, 16)
    ]
    found = Stages()
    results = [
        (name, milliseconds(found.calls(KernelShapes(**change))[name], 9, 2), change)
        for name, change in grid
    ]
    FIGURES["tune"] = results
    for stage in ("scores", "d_hidden", "d_weight"):
        for name, took, change in sorted(
            (result for result in results if result[0] == stage), key=lambda result: result[1]
        )[:3]:
            say(f"  tune {name}: {took:.3f} ms with {change}", short=True)
