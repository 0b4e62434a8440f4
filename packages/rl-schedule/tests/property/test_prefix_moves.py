"""Laws of what changes trees after packing: levelling, mergers, filling, evening out."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_schedule.prefix.filling import fill_empty_bins
from rl_schedule.prefix.forest import Forest
from rl_schedule.prefix.fragments import Fragments, SharedStep, cut_groups
from rl_schedule.prefix.slots import even_out_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A step whose samples stand in bins at random, under a cap that they keep."""

    step: SharedStep
    fragments: Fragments
    bins: list[int]
    slots: int

    def forest(self) -> Forest:
        return Forest(self.step, self.fragments, np.array(self.bins, dtype=np.int64), self.slots)

    def same_samples(self, forest: Forest) -> bool:
        found = {
            sample: prefix
            for trees in forest.trees
            for prefix, members in trees.items()
            for sample in members
        }
        return found == dict(enumerate(self.step.prefix_of.tolist()))

    def books_are_right(self, forest: Forest) -> bool:
        """Recompute tokens of bins and costs of ranks from the trees."""
        step, slots = self.step, self.slots

        def total(responses: np.ndarray, prefixes: np.ndarray, number: int) -> int:
            return sum(
                int(prefixes[prefix]) + int(responses[members].sum())
                for prefix, members in forest.trees[number].items()
            )

        bins = range(len(forest.trees))
        tokens = [total(step.responses, step.prefix_tokens, number) for number in bins]
        costs = [total(step.costs, step.prefix_costs, number) for number in bins]
        loads = np.reshape(costs, (step.num_ranks, slots)).sum(axis=1).tolist()
        return (
            forest.tokens == tokens and forest.loads == loads and max(tokens) <= step.cap
        ) and all(members for trees in forest.trees for members in trees.values())


@st.composite
def planted(draw: st.DrawFn) -> Planted:
    ranks, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    prefixes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    samples = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(prefixes) - 1),
                st.integers(1, 30),
                st.integers(0, ranks * slots - 1),
            ),
            min_size=1,
            max_size=30,
        )
    )
    linear = draw(st.integers(0, 20))
    # Only prefixes that have samples.
    used = sorted({prefix for prefix, _, _ in samples})
    prefix_tokens = np.array([prefixes[prefix] for prefix in used], dtype=np.int64)
    prefix_of = np.array([used.index(prefix) for prefix, _, _ in samples], dtype=np.int64)
    responses = np.array([length for _, length, _ in samples], dtype=np.int64)
    before = prefix_tokens[prefix_of]
    step = SharedStep(
        responses=responses,
        costs=linear * responses + (before + responses) ** 2 - before**2,
        prefix_of=prefix_of,
        prefix_tokens=prefix_tokens,
        prefix_costs=linear * prefix_tokens + prefix_tokens**2,
        cap=1,
        num_ranks=ranks,
        alignment=ranks,
        may_leave_empty=draw(st.booleans()),
    )
    fragments = Fragments(prefixes=prefix_of.tolist(), members=[[i] for i in range(len(samples))])
    bins = [number for _, _, number in samples]
    forest = Forest(step, fragments, np.array(bins, dtype=np.int64), slots)
    object.__setattr__(step, "cap", max(forest.tokens) + draw(st.integers(0, 20)))
    return Planted(step=step, fragments=fragments, bins=bins, slots=slots)


def empty(forest: Forest) -> int:
    return forest.trees.count({})


@given(planted())
def test_levelling_never_raises_the_costliest_rank_nor_empties_a_bin(case: Planted) -> None:
    forest, before = case.forest(), case.forest()
    forest.level()
    assert case.books_are_right(forest)
    assert case.same_samples(forest)
    assert max(forest.loads) <= max(before.loads)
    assert empty(forest) <= empty(before)


@given(planted(), st.booleans())
def test_mergers_raise_no_rank_and_leave_no_two_trees_that_fit_together(
    case: Planted, may_empty: bool
) -> None:
    forest, before = case.forest(), case.forest()
    merged = forest.merge_trees(may_empty=may_empty)
    assert case.books_are_right(forest)
    assert case.same_samples(forest)
    assert all(a <= b for a, b in zip(forest.loads, before.loads, strict=True))
    assert merged == (sum(map(len, forest.trees)) < sum(map(len, before.trees)))
    assert may_empty or empty(forest) <= empty(before)


@given(planted())
def test_filling_with_no_limit_leaves_a_bin_empty_only_where_all_hold_one_sample(
    case: Planted,
) -> None:
    forest = case.forest()
    fill_empty_bins(forest, most=None)
    assert case.books_are_right(forest)
    assert case.same_samples(forest)
    sizes = [sum(map(len, trees.values())) for trees in forest.trees]
    assert min(sizes) > 0 or max(sizes) <= 1


@given(planted())
def test_filling_keeps_the_limit_and_empties_nothing(case: Planted) -> None:
    forest, before = case.forest(), case.forest()
    fill_empty_bins(forest, most=max(before.loads))
    assert case.books_are_right(forest)
    assert case.same_samples(forest)
    assert max(forest.loads) <= max(before.loads)
    assert empty(forest) <= empty(before)


@given(planted())
def test_evening_out_raises_no_rank_and_not_its_costliest_micro_batch(case: Planted) -> None:
    forest, before = case.forest(), case.forest()
    even_out_slots(forest)
    assert case.books_are_right(forest)
    assert case.same_samples(forest)
    assert empty(forest) <= empty(before)
    for rank in range(forest.num_ranks):
        assert forest.loads[rank] <= before.loads[rank]
        costs = [
            max(
                sum(tree.cost for tree in one.trees_of(rank) if tree.number == number)
                for number in one.bins(rank)
            )
            for one in (forest, before)
        ]
        assert costs[0] <= costs[1]


@given(planted(), st.integers(1, 5_000))
def test_a_cut_puts_every_sample_into_one_fragment_under_the_cap(
    case: Planted, most_cost: int
) -> None:
    fragments = cut_groups(case.step, most_cost=most_cost)
    members = [sample for one in fragments.members for sample in one]
    assert sorted(members) == list(range(case.step.costs.size))
    for prefix, one in zip(fragments.prefixes, fragments.members, strict=True):
        assert set(case.step.prefix_of[one].tolist()) == {prefix}
    tokens = fragments.tokens(case.step)
    alone = np.array([len(one) == 1 for one in fragments.members])
    assert np.all((tokens <= case.step.cap) | alone)
