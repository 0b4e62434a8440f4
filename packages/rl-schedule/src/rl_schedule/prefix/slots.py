"""Trees change micro-batches inside their rank, so that a rank's micro-batches cost about the same.

That costs nothing, fills a pipeline better, and leaves ranks that meet after every micro-batch less
to wait for.

Invariants: the cap holds; no rank gets costlier, none of its micro-batches costlier than its
costliest was; no more micro-batches are empty than before.
"""

from rl_schedule.balancing.two_level import LptState, two_level_lpt
from rl_schedule.prefix.forest import Forest

__all__ = ["even_out_slots"]


def even_out_slots(forest: Forest) -> None:
    """Place the trees of each rank anew, longest first into its cheapest micro-batch with room.

    A rank where that does not fit, or lowers nothing, is left as it is.
    """
    for rank in range(forest.num_ranks):
        trees = sorted(
            forest.trees_of(rank), key=lambda tree: (-tree.tokens, tree.number, tree.prefix)
        )
        state = LptState.empty(
            num_ranks=1, num_slots=forest.num_slots, cap=forest.cap, targets=[0] * forest.num_slots
        )
        costs = [tree.cost for tree in trees]
        slots = two_level_lpt([tree.tokens for tree in trees], costs, state, forest.cap)
        if slots is None:
            continue
        before, after = [0] * forest.num_slots, [0] * forest.num_slots
        first = forest.bins(rank).start
        for tree, slot in zip(trees, slots, strict=True):
            before[tree.number - first] += tree.cost
            after[slot] += tree.cost
        if max(after) < max(before):
            for tree, slot in zip(trees, slots, strict=True):
                if first + slot != tree.number:
                    forest.move(tree.prefix, tree.members, tree.number, first + slot)
