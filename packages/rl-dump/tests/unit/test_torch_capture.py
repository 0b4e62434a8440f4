"""Log-probs of the training forward: first write wins, nothing stays behind, no number changes."""

from __future__ import annotations

import pytest
import torch

from rl_dump import DumpError
from rl_dump.torch import LogProbCapture


def test_the_first_write_wins_and_is_a_copy() -> None:
    with LogProbCapture() as capture:
        values = torch.tensor([-1.0, -2.0], requires_grad=True)
        capture.record(5, values)
        capture.record(5, values * 2)
        with torch.no_grad():
            values.mul_(10)
        (found,) = capture.collect([5])
    assert found.tolist() == [-1.0, -2.0]
    assert not found.requires_grad


def test_samples_come_back_in_the_shards_order_and_are_forgotten() -> None:
    with LogProbCapture() as capture:
        for position in (8, 1, 3):
            capture.record(position, torch.full((position,), float(position)))
        assert [len(item) for item in capture.collect([3, 8, 1])] == [3, 8, 1]
        assert len(capture._kept) == 0


def test_a_sample_no_forward_recorded_is_named() -> None:
    with (
        LogProbCapture() as capture,
        pytest.raises(DumpError, match="for 1 samples, the first at rollout_position 4"),
    ):
        capture.record(3, torch.zeros(1))
        capture.collect([3, 4])


def test_an_exception_leaves_nothing_behind() -> None:
    capture = LogProbCapture()
    with pytest.raises(RuntimeError), capture:
        capture.record(0, torch.zeros(1))
        raise RuntimeError
    assert len(capture._kept) == 0


def test_two_captures_know_nothing_of_each_other() -> None:
    with LogProbCapture() as first, LogProbCapture() as second:
        first.record(0, torch.zeros(1))
        assert len(second._kept) == 0


def test_off_it_keeps_nothing_and_gradients_are_the_same_bits() -> None:
    def step(enabled: bool) -> torch.Tensor:
        weight = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with LogProbCapture(enabled=enabled) as capture:
            log_probs = torch.log_softmax(weight, 0)
            capture.record(0, log_probs)
            torch.autograd.backward(log_probs[2] * 3)
            assert len(capture._kept) == int(enabled)
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(step(True), step(False))


def test_empty_parts_of_a_context_rank_are_kept() -> None:
    with LogProbCapture() as capture:
        capture.record(0, torch.zeros(0))
        assert capture.collect([0])[0].shape == (0,)
