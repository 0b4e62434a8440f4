"""What a plan costs in time: 1F1B pipelines, data-parallel synchronisation, bubbles, imbalance.

So dp, cp and the token cap can be chosen before GPUs are rented. Sources: 1F1B is PipeDream-Flush
(Narayanan et al., arXiv 2006.09503), interleaving is Narayanan et al., arXiv 2104.04473, section
2.2, in the order Megatron-Core runs it. Not modelled: point-to-point transfer, kernel launch,
overlap of the gradient reduction with the last backward passes.

Invariants: with equal micro-batches the bubble share is (P - 1) / (v * M + P - 1); no simulated
step is faster than its busiest stage. Axis letters: D ranks, M micro-batches of a rank, P stages.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rl_schedule.arrays import FloatArray, IntArray, positive_int
from rl_schedule.cost import CostModel, evaluate_cost
from rl_schedule.errors import ScheduleError
from rl_schedule.plan import SchedulePlan

__all__ = ["ClusterTiming", "StepTiming", "pipeline_seconds", "simulate_plan"]

BACKWARD_OVER_FORWARD = 2.0
"""A backward pass does two matrix products for every one of the forward pass."""

_LONGEST = 2.0**1000
"""No simulated time reaches it, so that sums over ranks and stages stay within float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTiming:
    """How fast the hardware is and how the model is laid out on it."""

    cost_per_second: float = 1.0
    """Cost units (FLOPs of a `TransformerCost`) per second that ONE GPU achieves in practice."""
    gpus_per_stage: int = 1
    """GPUs that share a stage of one data-parallel rank: tensor times context parallel."""
    pp_size: int = 1
    """Pipeline stages, P."""
    vpp_size: int = 1
    """Virtual chunks per stage, v; above 1, micro-batches come in multiples of `pipeline_group`."""
    pipeline_group: int | None = None
    """Micro-batches that go through a chunk before the next chunk; None = `pp_size`."""
    sync_seconds: float = 0.0
    """Gradient reduction and optimizer, once per step."""

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot run."""
        for name in ("gpus_per_stage", "pp_size", "vpp_size"):
            positive_int(getattr(self, name), name)
        if not self.cost_per_second > 0 or not self.sync_seconds >= 0:
            raise ScheduleError(
                f"cost_per_second must be > 0 and sync_seconds >= 0, got {self.cost_per_second} and"
                f" {self.sync_seconds}"
            )
        if self.vpp_size > 1 and (
            self.pp_size < 2
            or positive_int(self.pipeline_group or self.pp_size, "pipeline_group") < self.pp_size
        ):
            raise ScheduleError(
                "virtual chunks need at least 2 stages and a pipeline group of at least pp_size,"
                f" got pp_size={self.pp_size}, pipeline_group={self.pipeline_group}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Simulated time of one optimizer step.

    Shares are of `seconds` and add up with `useful_share` to 1.
    """

    seconds: float
    """From the first forward pass to the end of the synchronisation; the slowest rank counts."""
    useful_share: float
    """Time an average stage of an average rank computes."""
    bubble_share: float
    """Time an average stage waits for its pipeline to fill and drain."""
    imbalance_share: float
    """Time an average rank waits for the slowest one."""
    sync_share: float
    """Time of the synchronisation."""
    lockstep_seconds: float
    """Time if all ranks also met after every micro-batch, without pipeline.

    As with sharded parameters or expert parallelism.
    """
    rank_seconds: FloatArray
    """[D] pipeline time of each rank, synchronisation left out."""


def simulate_plan(
    plan: SchedulePlan, lengths: IntArray, cost: CostModel, timing: ClusterTiming
) -> list[StepTiming]:
    """Simulate every step of `plan`.

    Args:
        plan: the plan.
        lengths: int64 [N], padded tokens of every rollout position.
        cost: forward cost of a sample by length.
        timing: the cluster.

    Raises:
        ScheduleError: `vpp_size > 1` with a step whose micro-batches are no multiple of the
            pipeline group, or times so long that their sums leave float64.
    """
    costs = evaluate_cost(cost, lengths[plan.sample_positions]).astype(np.float64)
    num_rows = plan.micro_batch_offsets.size - 1
    summed = np.bincount(plan.placed_rows, weights=costs, minlength=num_rows).astype(np.float64)
    cost_DM = summed.reshape(plan.dp_size, -1)
    costliest = float(summed.max(initial=0.0))
    if costliest / timing.cost_per_second * num_rows >= _LONGEST:
        raise ScheduleError(
            f"a micro-batch costs {costliest:.3g}, and sums of such times leave float64; give"
            " costs in a larger unit"
        )
    ends = np.cumsum([0, *plan.num_microbatches]).tolist()
    return [_time_step(cost_DM[:, start:end], timing) for start, end in pairwise(ends)]


def _time_step(cost_DM: FloatArray, timing: ClusterTiming) -> StepTiming:
    stage_forward = cost_DM / (timing.cost_per_second * timing.gpus_per_stage * timing.pp_size)
    ranks = pipeline_seconds(
        stage_forward,
        pp_size=timing.pp_size,
        vpp_size=timing.vpp_size,
        pipeline_group=timing.pipeline_group,
    )
    busy = stage_forward.sum(axis=1) * (1.0 + BACKWARD_OVER_FORWARD)
    slowest = float(ranks.max())
    seconds = slowest + timing.sync_seconds
    scale = 1.0 / seconds if seconds else 0.0
    return StepTiming(
        seconds=seconds,
        useful_share=float(busy.mean()) * scale,
        bubble_share=float((ranks - busy).mean()) * scale,
        imbalance_share=float((slowest - ranks).mean()) * scale,
        sync_share=timing.sync_seconds * scale,
        # All stages of a micro-batch one after another, at the pace of the slowest rank.
        lockstep_seconds=float(stage_forward.max(axis=0).sum())
        * timing.pp_size
        * (1.0 + BACKWARD_OVER_FORWARD)
        + timing.sync_seconds,
        rank_seconds=ranks,
    )


def pipeline_seconds(
    forward: FloatArray, *, pp_size: int, vpp_size: int = 1, pipeline_group: int | None = None
) -> FloatArray:
    """Return the time each rank's pipeline takes, [D].

    Args:
        forward: [D, M] forward seconds of each micro-batch on one stage (all its virtual chunks
            together).
        pp_size: stages, P.
        vpp_size: virtual chunks per stage, v.
        pipeline_group: micro-batches per chunk turn; None = P.

    Example: 4 equal micro-batches of 1 s forward on 2 stages take (4 + 2 - 1) * (1 + 2) = 15 s.

    Raises:
        ScheduleError: `vpp_size > 1` and M is no multiple of the pipeline group.
    """
    ranks, count = forward.shape
    group = pipeline_group or pp_size
    if vpp_size > 1 and count % group:
        raise ScheduleError(
            f"{count} micro-batches per rank are no multiple of the pipeline group {group}; plan"
            f" with vpp_size={vpp_size}"
        )
    # (chunk, micro-batch) in the order of forwards: a group through chunk 0, then chunk 1, ...
    order = [
        (chunk, number)
        for start in range(0, count, group)
        for chunk in range(vpp_size)
        for number in range(start, min(start + group, count))
    ]
    programs = [deque(_program(order, stage, pp_size, vpp_size, group)) for stage in range(pp_size)]
    # When each pass (is backward, stage, chunk, micro-batch) ended, [D]; taken out by the one pass
    # that waits for it. Stage -1 stands for the data, which is there from the start.
    done = {(False, -1, 0, number): np.zeros(ranks) for number in range(count)}
    free = [np.zeros(ranks) for _ in range(pp_size)]
    # Round after round, each stage runs its program as far as what it needs is done.
    while left := sum(map(len, programs)):
        for stage, program in enumerate(programs):
            while program:
                backward, chunk, number = program[0]
                needed = _needs(
                    backward=backward,
                    stage=stage,
                    chunk=chunk,
                    last_stage=pp_size - 1,
                    last_chunk=vpp_size - 1,
                )
                ready = done.pop((*needed, number), None)
                if ready is None:
                    break
                program.popleft()
                seconds = forward[:, number] * (
                    (BACKWARD_OVER_FORWARD if backward else 1.0) / vpp_size
                )
                free[stage] = np.maximum(free[stage], ready) + seconds
                done[backward, stage, chunk, number] = free[stage]
        assert sum(map(len, programs)) < left, "the pipeline program waits for itself"
    slowest: FloatArray = np.maximum.reduce(free)
    return slowest


def _program(
    order: list[tuple[int, int]], stage: int, stages: int, chunks: int, group: int
) -> list[tuple[bool, int, int]]:
    """Return what one stage runs, as (is backward, chunk, micro-batch).

    Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.
    """
    # Enough forwards that the first micro-batch is back by then: one for each later stage; when
    # interleaved two of them (Megatron-Core's order), and a whole group for each later chunk.
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * group
    warm_up = min(warm_up, len(order))
    forwards = [(False, chunk, number) for chunk, number in order]
    backwards = [(True, chunks - 1 - chunk, number) for chunk, number in order]
    program = forwards[:warm_up]
    for index in range(warm_up, len(order)):
        program += [forwards[index], backwards[index - warm_up]]
    return program + backwards[len(order) - warm_up :]


def _needs(
    *, backward: bool, stage: int, chunk: int, last_stage: int, last_chunk: int
) -> tuple[bool, int, int]:
    """Return the pass of the same micro-batch that comes before, as (is backward, stage, chunk)."""
    if not backward:
        # Chunk after chunk, each through all stages.
        from_chunk_before = stage == 0 and chunk > 0
        return (False, last_stage, chunk - 1) if from_chunk_before else (False, stage - 1, chunk)
    if stage < last_stage:
        return True, stage + 1, chunk
    return (True, 0, chunk + 1) if chunk < last_chunk else (False, last_stage, last_chunk)
