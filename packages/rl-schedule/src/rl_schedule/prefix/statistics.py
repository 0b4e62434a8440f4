"""How good a plan with shared prefixes is, per step."""

from dataclasses import dataclass

__all__ = ["PrefixStepStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStepStats:
    """Figures of one optimizer step. Costs are those of the request's `cost_model`."""

    num_rollouts: int
    """Rollouts of the step."""
    num_samples: int
    """Samples of the step."""
    num_tokens: int
    """Tokens processed: every response, and each prefix once per micro-batch that needs it."""
    num_tokens_unshared: int
    """Tokens of the same samples if every one of them brought its own prefix."""
    prefixes: int
    """Different prefixes of the step."""
    prefix_copies: int
    """Prefixes processed, counted once per micro-batch that needs it."""
    micro_batches: int
    """Micro-batches per rank."""
    micro_batch_bound: int
    """No plan has fewer per rank: the fewest tokens over the cap, rounded up to the alignment."""
    fillers: int
    """Micro-batches without samples, over all ranks."""
    fill: float
    """Tokens over (micro-batches * cap)."""
    rank_imbalance: float
    """Costliest rank over the mean of the ranks, with the prefixes they really process."""
    slot_imbalance: float
    """Sum over slots of the costliest micro-batch, over the mean rank."""
    slowest_rank_cost: float
    """Cost of the costliest rank: what a step waits for."""
    slowest_rank_bound: float
    """No plan has a cheaper costliest rank: all work with the fewest prefixes, shared evenly."""
    path: str
    """How the step was cut, for example `shared(1)`, or `unshared` for single samples."""
