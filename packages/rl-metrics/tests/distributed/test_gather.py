"""Restoring full responses over real gloo ranks: exact, differentiable, one collective a call."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from rl_metrics import ContextParallel, GeometryError, MetricsError, response_owner
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.torch import gather, gather_responses, slice_response
from rl_metrics.torch.bits import PieceHeader, check_dtype, from_bits, to_bits

pytestmark = pytest.mark.distributed

NAN = math.nan
TOTALS, RESPONSES = [13, 40, 5, 200, 2], [5, 30, 0, 3, 1]


def _full(dtype: torch.dtype = torch.float32, width: tuple[int, ...] = ()) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, *width, generator=generator).to(dtype) for length in RESPONSES]


def _pieces(full: list[torch.Tensor], cp: ContextParallel) -> list[torch.Tensor]:
    return [
        slice_response(x, total, response, cp)
        for x, total, response in zip(full, TOTALS, RESPONSES, strict=True)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_full_responses_come_back_bit_for_bit(size: int) -> None:
    def work(rank: int, _: int) -> list[int]:
        cp = ContextParallel(size, rank)
        for full in (_full(), _full(torch.bfloat16), _full(torch.float64, (2, 3))):
            restored = gather_responses(_pieces(full, cp), TOTALS, RESPONSES, cp, group=None)
            assert all(torch.equal(a, b) for a, b in zip(restored, full, strict=True))
        return [piece.numel() for piece in _pieces(_full(), cp)]

    counts = run_gloo_ranks(work, size)
    assert any(0 in per_rank for per_rank in counts), "some rank must own nothing of some sample"
    assert [sum(column) for column in zip(*counts, strict=True)] == RESPONSES


def test_nan_stays_in_its_place() -> None:
    def work(rank: int, _: int) -> tuple[list[int], bool]:
        cp = ContextParallel(2, rank)
        full = _full()
        full[1][7] = float("nan")
        restored = gather_responses(_pieces(full, cp), TOTALS, RESPONSES, cp, group=None)
        return [int(x.isnan().sum()) for x in restored], bool(restored[1][7].isnan())

    assert run_gloo_ranks(work, 2) == [([0, 1, 0, 0, 0], True)] * 2


def test_one_collective_forward_and_one_backward_whatever_the_number_of_samples(
    counting_collectives: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    def work(rank: int, _: int) -> list[list[str]]:
        cp = ContextParallel(2, rank)
        counts: list[list[str]] = []
        for n in (1, 64):
            pieces = [piece.requires_grad_() for piece in _pieces(_full(), cp) * n]
            with counting_collectives() as forward:
                restored = gather_responses(pieces, TOTALS * n, RESPONSES * n, cp, group=None)
            counts.append(forward)
            with counting_collectives() as backward:
                torch.autograd.backward(torch.cat(restored).square().sum())
            counts.append(backward)
        return counts

    assert run_gloo_ranks(work, 2) == [[["all_reduce"]] * 4] * 2


def test_the_gradient_of_a_piece_is_the_sum_over_all_ranks_losses() -> None:
    def work(rank: int, _: int) -> bool:
        cp = ContextParallel(3, rank)
        pieces = [piece.requires_grad_() for piece in _pieces(_full(torch.float64), cp)]
        restored = gather_responses(pieces, TOTALS, RESPONSES, cp, group=None)
        torch.autograd.backward((rank + 1) * torch.cat(restored).square().sum())
        # Ranks weigh 1 + 2 + 3 = 6, and the slope of a square is 2 x.
        for piece in pieces:
            assert piece.grad is not None
            assert torch.allclose(piece.grad, 12 * piece.detach(), rtol=1e-14)
        return True

    assert run_gloo_ranks(work, 3) == [True] * 3


def test_a_terminal_reward_is_added_at_its_owner() -> None:
    def work(rank: int, _: int) -> list[list[float]]:
        cp = ContextParallel(2, rank)
        local = _pieces([torch.zeros(length) for length in RESPONSES], cp)
        for piece, total, response in zip(local, TOTALS, RESPONSES, strict=True):
            if response:
                owner, index = response_owner(total, response, response - 1, cp.size)
                if owner == rank:
                    piece[index] += 1.0
        return [x.tolist() for x in gather_responses(local, TOTALS, RESPONSES, cp, group=None)]

    expected = [[0.0] * (length - 1) + [1.0] if length else [] for length in RESPONSES]
    assert run_gloo_ranks(work, 2) == [expected] * 2


def test_contiguous_pieces_come_back() -> None:
    def work(rank: int, _: int) -> bool:
        cp, stream = ContextParallel(2, rank, "contiguous"), 260
        full = _full()
        offsets = [0, 13, 53, 58, 258]
        pieces = [
            slice_response(x, total, response, cp, stream_offset=offset, stream_length=stream)
            for x, total, response, offset in zip(full, TOTALS, RESPONSES, offsets, strict=True)
        ]
        restored = gather_responses(pieces, TOTALS, RESPONSES, cp, group=None)
        return all(torch.equal(a, b) for a, b in zip(restored, full, strict=True))

    assert run_gloo_ranks(work, 2) == [True, True]


def test_no_samples_need_no_collective() -> None:
    assert run_gloo_ranks(
        lambda rank, _: gather_responses([], [], [], ContextParallel(2, rank), group=None), 2
    ) == [[], []]


def test_one_rank_gets_its_pieces_back() -> None:
    full = _full()
    restored = gather_responses(full, TOTALS, RESPONSES, ContextParallel(), group=None)
    assert all(torch.equal(a, b) for a, b in zip(restored, full, strict=True))


def test_what_does_not_fit_is_refused_before_the_collective() -> None:
    def work(rank: int, _: int) -> bool:
        cp = ContextParallel(2, rank)
        with pytest.raises(
            MetricsError, match=r"sample 1: the piece has shape \(2,\), but rank \d of 2 owns"
        ):
            gather_responses(
                [*_pieces(_full(), cp)[:1], torch.ones(2), *_pieces(_full(), cp)[2:]],
                TOTALS,
                RESPONSES,
                cp,
                group=None,
            )
        with pytest.raises(MetricsError, match="1 pieces for 5 samples"):
            gather_responses([torch.ones(2)], TOTALS, RESPONSES, cp, group=None)
        with pytest.raises(MetricsError, match="pass the context-parallel group"):
            gather_responses(
                _pieces(_full(), cp), TOTALS, RESPONSES, ContextParallel(2, 1 - rank), group=None
            )
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def _caught(call: Callable[[], object]) -> str:
    with pytest.raises(MetricsError) as error:
        call()
    return str(error.value)


_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def _values(dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([-0.0, 1.0, 0.0, 2.0, 3.0]).to(dtype)
    if dtype.is_floating_point:
        values = torch.cat(
            [
                values,
                torch.tensor([NAN, math.inf, -math.inf, torch.finfo(dtype).tiny, -1.5]).to(dtype),
            ]
        )
    return values


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_number_is_its_bits(dtype: torch.dtype) -> None:
    values = _values(dtype)
    assert torch.equal(to_bits(from_bits(to_bits(values), dtype)), to_bits(values))
    assert torch.equal(from_bits(to_bits(values), dtype).nan_to_num(), values.nan_to_num())


def test_bits_come_back_for_every_dtype() -> None:
    def work(rank: int, _: int) -> list[torch.dtype]:
        exact = []
        for dtype in _DTYPES:
            values, cp = _values(dtype), ContextParallel(2, rank)
            length = values.numel()
            (restored,) = gather_responses(
                [slice_response(values, length + 3, length, cp)],
                [length + 3],
                [length],
                cp,
                group=None,
            )
            exact += (
                [dtype]
                if restored.dtype == dtype and torch.equal(to_bits(restored), to_bits(values))
                else []
            )
        return exact

    assert run_gloo_ranks(work, 2) == [_DTYPES] * 2


def test_numbers_too_wide_to_travel_are_refused() -> None:
    with pytest.raises(MetricsError, match=r"pieces of torch.complex128 cannot be gathered"):
        check_dtype(torch.complex128)


def test_dtypes_that_differ_raise_the_same_on_every_rank() -> None:
    def work(rank: int, _: int) -> str:
        cp = ContextParallel(2, rank)
        pieces = _pieces(_full(torch.float32 if rank else torch.float64), cp)
        return _caught(lambda: gather_responses(pieces, TOTALS, RESPONSES, cp, group=None))

    told = (
        "ranks of the group gather different dtypes: torch.float64 on rank 0, torch.float32 on rank"
        " 1. Convert the pieces to one dtype"
    )
    assert run_gloo_ranks(work, 2) == [told] * 2


def test_samples_in_another_order_raise_the_same_on_every_rank() -> None:
    def work(rank: int, _: int) -> str:
        cp, step = ContextParallel(3, rank), -1 if rank == 2 else 1
        return _caught(
            lambda: gather_responses(
                _pieces(_full(), cp)[::step], TOTALS[::step], RESPONSES[::step], cp, group=None
            )
        )

    assert len(set(told := run_gloo_ranks(work, 3))) == 1
    assert told[0].startswith(
        "ranks of the group gather different samples: ranks [2] pass other lengths, order or layout"
        " than rank 0"
    )


def test_pieces_that_require_grad_on_some_ranks_only_raise_on_every_rank() -> None:
    def work(rank: int, _: int) -> str:
        cp = ContextParallel(2, rank)
        pieces = [piece.requires_grad_(rank == 0) for piece in _pieces(_full(), cp)]
        return _caught(lambda: gather_responses(pieces, TOTALS, RESPONSES, cp, group=None))

    assert len(set(told := run_gloo_ranks(work, 2))) == 1
    assert "pieces require grad, but not on ranks [1]" in told[0]


def test_a_rank_without_tokens_takes_the_dtype_of_the_others() -> None:
    def work(rank: int, _: int) -> tuple[torch.dtype, list[float]]:
        cp = ContextParallel(2, rank)
        # The one response token of 2 tokens is predicted by position 0, which rank 0 owns.
        piece = torch.tensor([1.5], dtype=torch.bfloat16) if rank == 0 else torch.zeros(0)
        (restored,) = gather_responses([piece], [2], [1], cp, group=None)
        return restored.dtype, restored.tolist()

    assert run_gloo_ranks(work, 2) == [(torch.bfloat16, [1.5])] * 2


def test_where_nobody_has_tokens_nothing_comes_back() -> None:
    def work(rank: int, _: int) -> list[int]:
        return [
            x.numel()
            for x in gather_responses(
                [torch.zeros(0)], [1], [0], ContextParallel(2, rank), group=None
            )
        ]

    assert run_gloo_ranks(work, 2) == [[0], [0]]


def test_a_second_derivative_raises_instead_of_being_wrong() -> None:
    def work(rank: int, _: int) -> bool:
        cp = ContextParallel(2, rank)
        pieces = [piece.requires_grad_() for piece in _pieces(_full(torch.float64), cp)]
        loss = torch.cat(gather_responses(pieces, TOTALS, RESPONSES, cp, group=None)).pow(3).sum()
        first = torch.autograd.grad(loss, pieces, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.backward(torch.cat(first).sum())
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def test_overlapping_samples_are_refused() -> None:
    cp = ContextParallel(2, 0, "contiguous")
    with pytest.raises(MetricsError, match="pass the context-parallel group"):
        gather_responses(
            [torch.ones(2)] * 2,
            [4, 4],
            [2, 2],
            cp,
            group=None,
            stream_offsets=[0, 3],
            stream_length=8,
        )
    with pytest.raises(
        GeometryError,
        match="sample 1 starts at stream offset 3, but sample 0 takes the stream up to 4",
    ):
        gather_responses(
            [torch.ones(2)] * 2,
            [4, 4],
            [2, 2],
            ContextParallel(layout="contiguous"),
            group=None,
            stream_offsets=[0, 3],
            stream_length=8,
        )


def test_bits_and_gradient_pass_through_the_collective_in_this_process(world_of_one: None) -> None:
    # One rank is its own whole: value and gradient pass through the real collective unchanged.
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    header = PieceHeader(dtype=torch.float32, layout=7, requires_grad=True)
    places = torch.tensor([1, 0])
    total = gather._Gather.apply(x, places, 2, header, ContextParallel(), None)  # type: ignore[no-untyped-call]
    torch.autograd.backward((total * torch.tensor([5.0, 3.0])).sum())
    assert total.tolist() == [2.0, 1.0]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 5.0]
