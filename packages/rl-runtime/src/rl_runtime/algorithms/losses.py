"""The policy loss per token, as small pure functions.

With new, old and reference log-probs l, o, f of a sampled token and its advantage A:

    ratio      w = exp(l - o)
    surrogate  max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high))      Schulman et al. 2017 (PPO), eq. 7; two-sided clip: Yu et al. 2025 (DAPO), eq. 10
    KL         exp(f - l) - (f - l) - 1                                Schulman 2020, "Approximating KL Divergence", estimator k3
    loss       surrogate + kl_coef * KL - entropy_coef * H             Shao et al. 2024 (DeepSeekMath), eq. 3

l and o are over the same support, in the ratio as in the KL term l and f; the two may differ: the
ratio is taken over the kept set that was sampled from, the KL term over the kept set or over the
vocabulary. k3 is unbiased over the kept set; over the vocabulary it leaves out the tokens that the
filter cut.

How tokens become one number is rl-metrics' business.

Invariants: nothing here knows of masks, ranks or micro-batches; only l and H carry gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PolicyLoss", "Surrogate", "clipped_surrogate", "k3_divergence", "policy_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The clipped surrogate, token by token, float32 [K] each."""

    loss: torch.Tensor
    """max(-A w, -A clip(w))."""
    ratio: torch.Tensor
    """w, without gradient."""
    clipped: torch.Tensor
    """1 where the clipped term is the larger one, so that the token passes no gradient; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The whole loss and what a report shows of it, token by token, float32 [K] each."""

    loss: torch.Tensor
    """Surrogate, KL term and entropy bonus."""
    ratio: torch.Tensor
    """w, without gradient."""
    clipped: torch.Tensor
    """1 where the token is clipped."""
    kl: torch.Tensor | None
    """k3 against the reference, without gradient; None without a reference."""


def clipped_surrogate(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute PPO's clipped surrogate.

    Args:
        log_probs: float32 [K], under the policy that is trained; carries gradients.
        old_log_probs: float32 [K], under the policy that the ratio is taken against.
        advantages: float32 [K].
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.

    Returns:
        Loss, ratio and clipped tokens. A ratio of 1.5 with advantage 2 and clip_high 0.2 gives loss
        -2.4, clipped; with advantage -2 it gives 3.0, not clipped.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        loss=torch.maximum(plain, bounded),
        ratio=ratio.detach(),
        clipped=(bounded > plain).to(ratio.dtype),
    )


def k3_divergence(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) from one token: never negative, unbiased for tokens sampled
    from the policy.

    Args:
        log_probs: float32 [K], under the policy.
        ref_log_probs: float32 [K], under the reference.

    Returns:
        float32 [K]. Log-probs -1 and -1.5 give exp(-0.5) + 0.5 - 1 = 0.1065.
    """
    difference = ref_log_probs - log_probs
    return torch.expm1(difference) - difference


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_log_probs: torch.Tensor | None = None,
    kl_log_probs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Compute the loss of every token.

    Args:
        log_probs: as in `clipped_surrogate`.
        old_log_probs: as in `clipped_surrogate`.
        advantages: as in `clipped_surrogate`.
        clip_low: as in `clipped_surrogate`.
        clip_high: as in `clipped_surrogate`.
        ref_log_probs: float32 [K], under the reference; None: no KL term.
        kl_log_probs: float32 [K], under the policy that is trained, over the support of
            `ref_log_probs`; None: that is the support of `log_probs`.
        kl_coef: weight of the KL term.
        entropy: float32 [K], of the policy; needed where `entropy_coef` is not 0.
        entropy_coef: weight of the entropy bonus.

    Returns:
        The loss and its parts.
    """
    surrogate = clipped_surrogate(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high
    )
    loss = surrogate.loss
    kl = None
    if ref_log_probs is not None:
        divergence = k3_divergence(
            log_probs if kl_log_probs is None else kl_log_probs, ref_log_probs
        )
        loss = loss + kl_coef * divergence
        kl = divergence.detach()
    if entropy_coef:
        assert entropy is not None
        loss = loss - entropy_coef * entropy
    return PolicyLoss(loss=loss, ratio=surrogate.ratio, clipped=surrogate.clipped, kl=kl)
