"""`nucleus_lm_head_log_probs` on CPU: values, gradients, memory, and Megatron's `main_grad`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_topp import NucleusError, NucleusSet, reference
from rl_topp.nucleus import OnTruncated

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rl_topp.lm_head import Method, nucleus_lm_head_log_probs  # noqa: E402
from rl_topp.torch import nucleus_log_probs  # noqa: E402

ALL = ("log_probs", "full_log_probs", "entropy", "full_entropy")
NUM_ROWS, VOCAB_SIZE, PADDED, WIDTH = 14, 9, 11, 4
METHODS: tuple[Method, ...] = ("auto", "sparse", "blocked")


class _Case:
    def __init__(self, rows: NucleusSet, dtype: Any = torch.float64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.hidden = (
            torch.randn(len(rows), WIDTH, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
        )
        self.weight = (
            torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
        )
        self.targets = torch.randint(0, rows.vocab_size, (len(rows),), generator=generator)

    def logits(self) -> Any:
        return (
            (self.hidden.double() @ self.weight.double().t())
            .detach()
            .numpy()[:, : self.rows.vocab_size]
        )

    def scores(self, **options: Any) -> Any:
        return nucleus_lm_head_log_probs(
            self.hidden, self.weight, self.targets, self.rows, **options
        )


@pytest.fixture
def case(random_rows: Callable[..., NucleusSet]) -> _Case:
    return _Case(random_rows(np.random.default_rng(0), NUM_ROWS, VOCAB_SIZE))


@pytest.mark.parametrize(
    ("wanted", "on_truncated"),
    [(("log_probs",), "mask"), (("log_probs", "entropy"), "full"), (ALL, "mask")],
)
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_exact_in_float64(
    method: Method, on_truncated: OnTruncated, wanted: tuple[str, ...], case: _Case
) -> None:
    options: dict[str, Any] = {
        "method": method,
        "on_truncated": on_truncated,
        "temperature": 0.7,
        "block_bytes": 300,
    }
    options |= dict.fromkeys(set(wanted) - {"log_probs"}, True)

    def scores(hidden: Any, weight: Any) -> tuple[Any, ...]:
        found = nucleus_lm_head_log_probs(hidden, weight, case.targets, case.rows, **options)
        return tuple(getattr(found, name) for name in wanted)

    expected = reference.nucleus_scores(
        case.logits(), case.targets.numpy(), case.rows, temperature=0.7, on_truncated=on_truncated
    )
    for name, score in zip(wanted, scores(case.hidden, case.weight), strict=True):
        np.testing.assert_allclose(score.detach().numpy(), getattr(expected, name), atol=1e-12)
    assert torch.autograd.gradcheck(scores, (case.hidden, case.weight))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-3)])
def test_narrow_inputs_agree_with_the_reference(
    dtype: Any, tolerance: float, method: Method, random_rows: Callable[..., NucleusSet]
) -> None:
    case = _Case(random_rows(np.random.default_rng(4), 200, VOCAB_SIZE), dtype, seed=4)
    scores = case.scores(method=method)
    expected = reference.nucleus_scores(case.logits(), case.targets.numpy(), case.rows)
    np.testing.assert_allclose(scores.log_probs.detach().numpy(), expected.log_probs, atol=1e-5)
    upstream = torch.randn(200, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((scores.log_probs * upstream).sum())
    support = reference.keep_mask(case.rows, case.targets.numpy())
    gradient = (
        torch.tensor(reference.score_gradient(case.logits(), case.targets.numpy(), support))
        * upstream[:, None]
    )
    for found, wanted in (
        (case.hidden.grad, gradient @ case.weight.detach().double()[:VOCAB_SIZE]),
        (case.weight.grad[:VOCAB_SIZE], gradient.t() @ case.hidden.detach().double()),
    ):
        assert found.dtype == dtype
        assert torch.linalg.norm(found.double() - wanted) / torch.linalg.norm(wanted) < tolerance


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_score_get_exactly_no_gradient_and_padding_neither(
    method: Method, case: _Case
) -> None:
    torch.autograd.backward(case.scores(method=method).log_probs.sum())
    silent = ~case.rows.scored_mask()
    assert silent.any()
    assert (case.hidden.grad.numpy()[silent] == 0).all()
    assert (case.weight.grad[VOCAB_SIZE:] == 0).all()


def test_all_methods_agree_with_the_scores_from_logits(case: _Case) -> None:
    options: dict[str, Any] = {"full_log_probs": True, "entropy": True, "full_entropy": True}
    expected = nucleus_log_probs(case.hidden @ case.weight.t(), case.targets, case.rows, **options)
    for method in METHODS:
        for name in ALL:
            torch.testing.assert_close(
                getattr(case.scores(method=method, **options), name), getattr(expected, name)
            )


def test_results_repeat_bit_for_bit(random_rows: Callable[..., NucleusSet]) -> None:
    case = _Case(random_rows(np.random.default_rng(7), 500, VOCAB_SIZE), torch.float32)
    runs = []
    for _ in range(2):
        case.hidden.grad = case.weight.grad = None
        torch.autograd.backward(case.scores(method="sparse").log_probs.square().sum())
        runs.append((case.hidden.grad.clone(), case.weight.grad.clone()))
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))


def test_rows_without_any_filter_ignore_the_method(case: _Case) -> None:
    rows = NucleusSet.unfiltered(NUM_ROWS, vocab_size=VOCAB_SIZE)
    scores = [
        nucleus_lm_head_log_probs(
            case.hidden, case.weight, case.targets, rows, method=method
        ).log_probs
        for method in METHODS
    ]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_only_what_needs_a_gradient_gets_one(case: _Case) -> None:
    empty = nucleus_lm_head_log_probs(
        case.hidden[:0], case.weight, case.targets[:0], NucleusSet.empty(vocab_size=VOCAB_SIZE)
    )
    torch.autograd.backward(empty.log_probs.sum())
    assert (case.weight.grad == 0).all()
    with torch.no_grad():
        assert not case.scores().log_probs.requires_grad
    frozen = nucleus_lm_head_log_probs(case.hidden.detach(), case.weight, case.targets, case.rows)
    case.weight.grad = None
    torch.autograd.backward(frozen.log_probs.sum())
    assert case.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_diverged_model_never_looks_like_a_row_without_a_score(method: Method) -> None:
    hidden = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    rows = NucleusSet.from_lists([[0, 1], [0, 1]], vocab_size=3)
    scores = nucleus_lm_head_log_probs(
        hidden, torch.ones(3, 2), torch.tensor([0, 1]), rows, method=method
    )
    assert scores.log_probs[0].isnan()
    assert scores.log_probs[1].isfinite()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("with_full", [False, True])
def test_an_overflowed_model_scores_nan_and_not_probability_one(
    method: Method, with_full: bool
) -> None:
    hidden = torch.tensor([[3e38], [1.0], [3e38], [3e38]], requires_grad=True)
    rows = NucleusSet.from_lists([[0, 1], [0, 1], None], vocab_size=3).append(
        NucleusSet.not_sampled(1, vocab_size=3)
    )
    scores = nucleus_lm_head_log_probs(
        hidden,
        torch.full((3, 1), -10.0),
        torch.tensor([0, 1, 2, 0]),
        rows,
        method=method,
        entropy=True,
        full_log_probs=with_full,
    )
    for score in (scores.log_probs, scores.entropy, scores.full_log_probs):
        if score is not None:
            assert score.isnan().tolist() == [True, False, True, False]
            assert score[3] == 0.0
    torch.autograd.backward(scores.log_probs.sum())
    assert hidden.grad is not None
    assert hidden.grad[:, 0].isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("method", METHODS)
def test_narrow_gradients_of_both_scores_together_keep_the_promise(method: Method) -> None:
    """Set and vocabulary nearly cancel; 3e-3 of the norm is what `blocked` promises."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, 8, generator=generator).bfloat16() for count in (64, 50))
    top_ids = (hidden.float() @ weight.float().t()).topk(40, dim=1).indices
    rows = NucleusSet.from_lists(list(top_ids.numpy()), vocab_size=50)

    def gradients(dtype: Any) -> tuple[Any, Any]:
        left, right = (
            operand.to(dtype, copy=True).requires_grad_() for operand in (hidden, weight)
        )
        scores = nucleus_lm_head_log_probs(
            left, right, top_ids[:, 0], rows, method=method, full_log_probs=True
        )
        assert scores.full_log_probs is not None
        torch.autograd.backward((scores.log_probs - scores.full_log_probs).sum())
        return left.grad, right.grad

    for found, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert torch.linalg.norm(found.double() - exact) < 3e-3 * torch.linalg.norm(exact)


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("status", [0, 1])
def test_no_tensor_of_rows_times_vocabulary_exists(
    status: int, method: Method, random_rows: Callable[..., NucleusSet]
) -> None:
    num_rows, vocab_size, width = 256, 4096, 8
    rows = random_rows(
        np.random.default_rng(0), num_rows, vocab_size, statuses=(status,), largest=9
    )
    hidden = torch.randn(num_rows, width, requires_grad=True)
    weight = torch.randn(vocab_size, width, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_rows,))
    with _LargestTensor() as largest:
        torch.autograd.backward(
            nucleus_lm_head_log_probs(hidden, weight, targets, rows, method=method).log_probs.sum()
        )
    assert largest.numel <= num_rows * vocab_size // 4
    if status == 0 and method == "sparse":
        assert largest.numel <= max(vocab_size * width, num_rows * 10 * width)


def _megatron_weight(values: Any, *, tied: bool) -> Any:
    """Make a parameter as Megatron-Core's data-parallel wrapper leaves it."""
    weight: Any = torch.nn.Parameter(values.detach().clone())
    weight.main_grad = torch.full(values.shape, 0.25, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    if tied:
        weight.zero_out_wgrad = True
    return weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_main_grad_receives_the_gradient_on_top_of_what_it_holds(
    method: Method, tied: bool, random_rows: Callable[..., NucleusSet]
) -> None:
    case = _Case(random_rows(np.random.default_rng(9), 60, VOCAB_SIZE), torch.float32)
    torch.autograd.backward(case.scores(method=method).log_probs.sum())
    weight = _megatron_weight(case.weight, tied=tied)
    for repeat in (1, 2):
        torch.autograd.backward(
            nucleus_lm_head_log_probs(
                case.hidden.detach(), weight, case.targets, case.rows, method=method
            ).log_probs.sum()
        )
        torch.testing.assert_close(
            weight.main_grad, 0.25 + repeat * case.weight.grad, atol=1e-5, rtol=1e-5
        )
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape
        if tied:
            assert (weight.grad == 0).all()
        weight.grad = None


def test_main_grad_can_be_declined_and_needs_megatron_s_flag(case: _Case) -> None:
    weight = _megatron_weight(case.weight.float(), tied=False)
    hidden = case.hidden.detach().float()
    torch.autograd.backward(
        nucleus_lm_head_log_probs(
            hidden, weight, case.targets, case.rows, use_main_grad=False
        ).log_probs.sum()
    )
    assert (weight.main_grad == 0.25).all()
    assert weight.grad.abs().sum() > 0
    del weight.grad_added_to_main_grad
    torch.autograd.backward(
        nucleus_lm_head_log_probs(hidden, weight, case.targets, case.rows).log_probs.sum()
    )
    assert (weight.main_grad == 0.25).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": torch.zeros(3, 2)}, "do not fit"),
        (
            {
                "hidden": torch.zeros(3, 4, dtype=torch.float16),
                "weight": torch.zeros(6, 4, dtype=torch.float16),
            },
            "float16",
        ),
        ({"weight": torch.zeros(6, 4, dtype=torch.float64)}, "share one of"),
        ({"weight": torch.zeros(6, 4, device="meta")}, "expected one device"),
        ({"method": "dense"}, "'dense'"),
        ({"hidden_gradient": "sum"}, "'sum'"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": 1e6}, "block_bytes"),
        ({"rows": NucleusSet.unfiltered(2, vocab_size=6)}, "align"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    inputs: dict[str, Any] = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(6, 4),
        "targets": torch.zeros(3, dtype=torch.long),
        "rows": NucleusSet.unfiltered(3, vocab_size=6),
    } | change
    operands = [inputs.pop(name) for name in ("hidden", "weight", "targets", "rows")]
    with pytest.raises(NucleusError, match=words):
        nucleus_lm_head_log_probs(*operands, **inputs)
