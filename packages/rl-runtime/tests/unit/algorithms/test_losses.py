"""The per-token loss on numbers worked out by hand."""

import math

import pytest
import torch

from rl_runtime.algorithms.losses import clipped_surrogate, k3_divergence, policy_loss


def _ratios(values: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor(values, dtype=torch.float64))


def test_surrogate_is_minus_advantage_times_ratio_inside_the_clip_range() -> None:
    result = clipped_surrogate(
        _ratios([1.1, 0.9]), torch.zeros(2), torch.tensor([2.0, -3.0]), clip_low=0.2, clip_high=0.2
    )
    assert result.loss.tolist() == pytest.approx([-2.2, 2.7])
    assert result.clipped.tolist() == [0.0, 0.0]
    assert result.ratio.tolist() == pytest.approx([1.1, 0.9])


def test_a_large_ratio_is_clipped_only_where_it_would_lower_the_loss() -> None:
    # advantage 2: min(1.5, 1.2) * 2 = 2.4; advantage -2: max over -A w = 3.0 and -A * 1.2 = 2.4 is
    # 3.0
    result = clipped_surrogate(
        _ratios([1.5, 1.5]), torch.zeros(2), torch.tensor([2.0, -2.0]), clip_low=0.2, clip_high=0.2
    )
    assert result.loss.tolist() == pytest.approx([-2.4, 3.0])
    assert result.clipped.tolist() == [1.0, 0.0]


def test_a_small_ratio_is_clipped_only_where_it_would_lower_the_loss() -> None:
    result = clipped_surrogate(
        _ratios([0.5, 0.5]), torch.zeros(2), torch.tensor([2.0, -2.0]), clip_low=0.2, clip_high=0.3
    )
    assert result.loss.tolist() == pytest.approx([-1.0, 1.6])
    assert result.clipped.tolist() == [0.0, 1.0]


def test_low_and_high_clip_are_separate() -> None:
    result = clipped_surrogate(
        _ratios([1.25, 1.35]), torch.zeros(2), torch.ones(2), clip_low=0.1, clip_high=0.3
    )
    assert result.loss.tolist() == pytest.approx([-1.25, -1.3])


def test_gradient_is_minus_advantage_times_ratio_and_zero_where_clipped() -> None:
    log_probs = _ratios([1.1, 1.5, 0.5]).requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -2.0], dtype=torch.float64)
    torch.autograd.backward(
        clipped_surrogate(
            log_probs, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2
        ).loss.sum()
    )
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2.2, 0.0, 0.0])


def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    surrogate = clipped_surrogate(
        log_probs, log_probs.detach(), torch.tensor([0.5, -1.5]), clip_low=0.2, clip_high=0.2
    )
    torch.autograd.backward(surrogate.loss.sum())
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 1.5]


def test_k3_on_literal_numbers() -> None:
    # reference - policy is -0.5: exp(-0.5) + 0.5 - 1 = 0.10653066;
    # it is +0.5: exp(0.5) - 0.5 - 1 = 0.14872127.
    values = k3_divergence(torch.tensor([-1.0, -1.5, -3.0]), torch.tensor([-1.5, -1.0, -3.0]))
    assert values.tolist() == pytest.approx([0.10653066, 0.14872127, 0.0], abs=1e-7)


def test_k3_is_accurate_for_tiny_differences() -> None:
    difference = 1e-4
    value = k3_divergence(torch.tensor([-difference], dtype=torch.float32), torch.tensor([0.0]))
    assert value.item() == pytest.approx(difference**2 / 2, rel=2e-3)


def test_whole_loss_adds_kl_and_takes_off_the_entropy_bonus() -> None:
    result = policy_loss(
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([2.0]),
        clip_low=0.2,
        clip_high=0.2,
        ref_log_probs=torch.tensor([-1.5]),
        kl_coef=0.1,
        entropy=torch.tensor([0.7]),
        entropy_coef=0.01,
    )
    assert result.loss.item() == pytest.approx(-2.0 + 0.1 * 0.10653066 - 0.01 * 0.7)
    assert result.kl is not None
    assert result.kl.item() == pytest.approx(0.10653066)


def test_the_kl_term_may_be_over_another_support_than_the_ratio() -> None:
    # ratio over the kept set: exp(-1 - -1) = 1; KL over the vocabulary: reference - policy = -0.5,
    # of which k3 is 0.10653066, slope 1 - exp(-0.5)
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    full_log_probs = torch.tensor([-1.2], dtype=torch.float64, requires_grad=True)
    result = policy_loss(
        log_probs,
        torch.tensor([-1.0]),
        torch.tensor([2.0]),
        clip_low=0.2,
        clip_high=0.2,
        ref_log_probs=torch.tensor([-1.7], dtype=torch.float64),
        kl_log_probs=full_log_probs,
        kl_coef=0.1,
    )
    assert result.loss.item() == pytest.approx(-2.0 + 0.1 * 0.10653066)
    torch.autograd.backward(result.loss.sum())
    assert log_probs.grad is not None
    assert full_log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-2.0)
    assert full_log_probs.grad.item() == pytest.approx(0.1 * (1 - math.exp(-0.5)))


def test_without_reference_there_is_no_kl() -> None:
    result = policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)
    assert result.kl is None
    assert result.loss.item() == -1.0


def test_a_bonus_of_entropy_pushes_entropy_up() -> None:
    entropy = torch.tensor([0.5], requires_grad=True)
    result = policy_loss(
        torch.zeros(1),
        torch.zeros(1),
        torch.zeros(1),
        clip_low=0.2,
        clip_high=0.2,
        entropy=entropy,
        entropy_coef=0.3,
    )
    torch.autograd.backward(result.loss.sum())
    assert entropy.grad is not None
    assert entropy.grad.item() == pytest.approx(-0.3)
    assert math.isfinite(entropy.grad.item())
