"""The policy loss per token, as small pure functions.

Each function states its equation in the new, old and reference log-probs l, o, f of a sampled
token, its advantage A and the entropy H of its distribution. How tokens become one number is
rl-metrics' business.

Axes: K tokens.

Invariants: nothing here knows of masks, ranks or micro-batches; only l and H carry gradients; l and
o are over the same support, as are l and f, but the two supports may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["PolicyLoss", "clipped_surrogate", "k3_divergence", "policy_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The loss and what a report shows of it, token by token, float32 [K] each."""

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
) -> PolicyLoss:
    """Compute PPO's clipped surrogate.

    With w = exp(l - o): max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high)); Schulman et al. 2017
    (PPO), eq. 7, with the two-sided clip of Yu et al. 2025 (DAPO), eq. 10.

    Args:
        log_probs: float32 [K], under the policy that is trained; carries gradients.
        old_log_probs: float32 [K], under the policy that the ratio is taken against.
        advantages: float32 [K].
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.

    Returns:
        Loss, ratio and clipped tokens, without a KL term. A ratio of 1.5 with advantage 2 and
        clip_high 0.2 gives loss -2.4, clipped; with advantage -2 it gives 3.0, not clipped.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        # The larger loss of the two: a clip may only ever take a gain away.
        loss=torch.maximum(plain, bounded),
        ratio=ratio.detach(),
        # Not >=: inside the clip range both are equal, and the token does pass a gradient.
        clipped=(bounded > plain).to(ratio.dtype),
        kl=None,
    )


def k3_divergence(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) from one token.

    exp(f - l) - (f - l) - 1: estimator k3 of Schulman 2020, "Approximating KL Divergence". Never
    negative; unbiased over the nucleus that was sampled from. Over the vocabulary it leaves out the
    tokens that the filter cut.

    Args:
        log_probs: float32 [K], under the policy.
        ref_log_probs: float32 [K], under the reference.

    Returns:
        float32 [K]. Log-probs -1 and -1.5 give exp(-0.5) + 0.5 - 1 = 0.1065.
    """
    difference = ref_log_probs - log_probs
    # expm1: close to the reference, exp(x) - 1 would lose all digits.
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

    surrogate + kl_coef * KL - entropy_coef * H; Shao et al. 2024 (DeepSeekMath), eq. 3, with an
    entropy bonus.

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
    loss, kl = surrogate.loss, None
    if ref_log_probs is not None:
        divergence = k3_divergence(
            log_probs if kl_log_probs is None else kl_log_probs, ref_log_probs
        )
        loss = loss + kl_coef * divergence
        kl = divergence.detach()
    if entropy_coef:
        assert entropy is not None
        loss = loss - entropy_coef * entropy
    return replace(surrogate, loss=loss, kl=kl)
